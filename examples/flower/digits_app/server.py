"""The server: FedAvg on the private mean."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import qclip
from digits_app.task import accuracy, build_model
from qclip.integrations.flower import PrivateMean

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds; print the accuracy and what the run has cost."""
    config = context.run_config
    model = build_model()
    aggregator = qclip.federated.Aggregator(
        model,
        num_clients=int(config["num-clients"]),
        cohort_size=int(config["cohort-size"]),
        rounds=int(config["rounds"]),
        noise_multiplier=float(config["noise-multiplier"]),
        delta=float(config["delta"]),
    )

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": accuracy(model)})

    strategy = PrivateMean(FedAvg(fraction_evaluate=0.0), aggregator, path=config["save-to"] or None)
    initial = ArrayRecord(model.state_dict())
    result = strategy.start(grid, initial, num_rounds=aggregator.plan.rounds, evaluate_fn=evaluate)
    found = result.evaluate_metrics_serverapp[aggregator.plan.rounds]["accuracy"]
    print(f"held-out accuracy {found:.3f} after {aggregator.round} rounds, epsilon {aggregator.epsilon():.2f}")
