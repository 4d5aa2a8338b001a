"""Estimators of scikit-learn (1.6 or newer): `PrivateClassifier` and `PrivateRegressor`."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_is_fitted,
    column_or_1d,
    validate_data,  # pyrefly: ignore[missing-module-attribute] - its stubs are older
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from qclip import _validate as check
from qclip._validate import Floats
from qclip.tables import Schema, Table, models
from qclip.tables.predictor import Predictor
from qclip.tables.table import is_missing
from qclip.training.make import make_private


class _PrivateEstimator(BaseEstimator):
    """What classifiers and regressors have in common."""

    def __init__(
        self,
        *,
        epsilon: float | None = 3.0,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        model: models.Kind = "linear",
        columns: Mapping[str, str] | None = None,
        epochs: int = 40,
        batch_size: int | None = None,
        learning_rate: float | Literal["auto"] = "auto",
        random_state: Any = None,
    ) -> None:
        self.epsilon, self.delta, self.noise_multiplier = epsilon, delta, noise_multiplier
        self.model, self.columns, self.epochs, self.batch_size = model, columns, epochs, batch_size
        self.learning_rate, self.random_state = learning_rate, random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # pyrefly: ignore[missing-attribute] - as above
        tags.input_tags.allow_nan = True  # a missing value is an input of its own
        tags.non_deterministic = self.random_state is None
        return tags

    @property
    def predictor_(self) -> Predictor:
        """The trained model without scikit-learn: ``save`` writes it to one file, which `qclip.load` reads."""
        check_is_fitted(self)
        facts = {"epsilon": self.epsilon_ if math.isfinite(self.epsilon_) else None, "delta": self.delta_}
        return Predictor(self.model_, self.schema_, self.model, facts | {"unit": "any one row"})

    def save(self, path: Any) -> None:
        """Write the trained model to one file, without secrets: `qclip.load` reads it."""
        self.predictor_.save(path)

    def _fit(
        self,
        columns: dict[str, Any],
        target: NDArray[Any],
        loss: Callable[[Tensor, Tensor], Tensor],
        **goal: Any,
    ) -> Self:
        """Train on the columns of a table and a target."""
        name = "target"
        while name in columns:
            name += "_"
        table = Table.of_frame(columns | {name: target}, source="X")
        declared = dict(self.columns or {})
        if not hasattr(self, "feature_names_in_"):  # an array: its columns are numbers, also where all values differ
            declared = dict.fromkeys(columns, "number") | declared
        if "interval" in goal:
            declared[name] = "{}:{}".format(*goal.pop("interval"))
        self.schema_ = Schema.of(table, target=name, columns=declared, **goal)
        for remark in self.schema_.remarks:
            warnings.warn(remark, stacklevel=3)
        data = TensorDataset(self.schema_.inputs(table), self.schema_.targets(table))
        seed = self._seed()
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
            self.model_ = models.build(self.model, self.schema_.width, self.schema_.outputs)
        automatic = self.learning_rate == "auto"
        rate = 1.0 if automatic else check.positive("learning_rate", self.learning_rate)
        training = make_private(
            self.model_,
            torch.optim.SGD(self.model_.parameters(), lr=rate),
            data,
            loss=loss,
            batch_size=_batch_size(len(data)) if self.batch_size is None else self.batch_size,
            epochs=self.epochs,
            epsilon=self.epsilon if self.noise_multiplier is None else None,
            delta=1 / (10 * len(data)) if self.delta is None else self.delta,
            noise_multiplier=self.noise_multiplier,
            step_size="auto" if automatic else None,
            rescale_to_unit_norm=True,
            seed=seed,
        )
        for _ in range(self.epochs):
            for batch in training.loader:
                training.step(*batch)
        self.model_.eval()
        self.epsilon_, self.delta_ = training.epsilon(), training.plan.delta
        self.n_iter_ = len(training.history)
        self.history_ = list(training.history)
        return self

    def _seed(self) -> int | None:
        if self.random_state is None:
            return None
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _features(self, X: Any, *, reset: bool) -> dict[str, Any]:
        """Return the columns of a data frame as they are, or those of an array of numbers by their place."""
        if hasattr(X, "columns") and hasattr(X, "dtypes"):
            validate_data(self, X, reset=reset, skip_check_array=True)
            return {str(name): X[name] for name in X.columns}
        least = 2 if reset else 1
        array = validate_data(
            self, X, reset=reset, dtype=np.float64, ensure_all_finite="allow-nan", ensure_min_samples=least
        )
        return {f"x{k}": array[:, k] for k in range(array.shape[1])}


class PrivateClassifier(ClassifierMixin, _PrivateEstimator):
    """A classifier of tables, trained with differential privacy: adding or removing any one row changes little.

    Threshold and learning rate find themselves. Columns are encoded by public constants (`qclip.tables`): categories
    and words are hashed, numbers interpolated, missing values are inputs of their own. The names and kinds of the
    columns, the number of rows and the classes count as public.

    Args:
        epsilon: The privacy budget of one `fit`; each further `fit` on the same data spends as much again.
        delta: By default a tenth of one over the number of rows.
        noise_multiplier: The noise relative to one row, instead of ``epsilon``; 0 for no privacy.
        model: "linear" or "mlp", a perceptron with 64 hidden units.
        columns: The kinds of columns, as for `qclip.tables.Schema.of`. A public range, such as
            ``{"age": "0:120"}``, serves better than a number of unknown size. Columns of arrays are "x0", "x1", ...
        epochs: The length of the training.
        batch_size: The expected number of rows of a step; by default 1024, or a third of fewer rows (but 16).
        learning_rate: In units of the threshold; "auto" finds it, at no cost in privacy.
        classes: The classes; by default read from ``y``, which makes them public.
        random_state: A seed, for tests: whoever knows it can subtract the noise.

    Attributes:
        epsilon_: The epsilon that was spent, at ``delta_``; infinite without noise.
        delta_: The delta of the guarantee.
        classes_: The classes, in the order of the probabilities.
        schema_: What the columns became.
        model_: The torch module.
        history_: The released values of each step.
        n_iter_: The number of steps.

    >>> X, y = np.repeat([[0.0], [4.0]], 200, axis=0), np.repeat(["no", "yes"], 200)
    >>> private = PrivateClassifier(epsilon=3.0, epochs=5, random_state=0).fit(X, y)
    >>> private.predict([[0.0], [4.0]]).tolist(), private.epsilon_ <= 3.0
    (['no', 'yes'], True)
    """

    def __init__(
        self,
        *,
        epsilon: float | None = 3.0,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        model: models.Kind = "linear",
        columns: Mapping[str, str] | None = None,
        epochs: int = 40,
        batch_size: int | None = None,
        learning_rate: float | Literal["auto"] = "auto",
        classes: ArrayLike | None = None,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=noise_multiplier,
            model=model,
            columns=columns,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            random_state=random_state,
        )
        self.classes = classes

    def fit(self, X: Any, y: Any) -> Self:
        """Train on a data frame or array, [rows, columns], and the class of each row, [rows]."""
        columns, y = _pairs(self, X, y)
        _refuse_unknown(y)  # before scikit-learn casts it to whole numbers
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if self.classes is not None:
            given = np.unique(np.asarray(self.classes))
            if unknown := sorted(set(self.classes_.tolist()) - set(given.tolist())):
                raise check.refuse("y", unknown[0], f"one of the classes {given.tolist()}", "complete the classes")
            codes = np.searchsorted(given, self.classes_)[codes]
            self.classes_ = given
        if len(self.classes_) < 2:
            raise check.Refusal(f"y has one class, {self.classes_.tolist()}: there is nothing to tell apart")
        names = tuple(map(str, self.classes_.tolist()))
        names = names if len(set(names)) == len(names) else tuple(map(str, range(len(names))))
        return self._fit(columns, np.array(names, dtype=object)[codes], nn.CrossEntropyLoss(), classes=names)

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the predicted class of each row, [rows]."""
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(1)]

    def predict_proba(self, X: Any) -> Floats:
        """Return the probability of each class, [rows, classes]."""
        check_is_fitted(self)
        return self.predictor_.predict_proba(self._features(X, reset=False))


class PrivateRegressor(RegressorMixin, _PrivateEstimator):
    """A regressor of tables, trained with differential privacy, as `PrivateClassifier`.

    Args:
        target_range: The public range (low, high) of the target. Targets beyond it are moved to its ends.
        epsilon: As for `PrivateClassifier`, like the arguments below.
        delta: As there.
        noise_multiplier: As there.
        model: As there.
        columns: As there.
        epochs: As there.
        batch_size: As there.
        learning_rate: As there.
        random_state: As there.

    Attributes:
        epsilon_: The epsilon that was spent, at ``delta_``; infinite without noise.
        delta_: The delta of the guarantee.
        schema_: What the columns became.
        model_: The torch module.
        history_: The released values of each step.
        n_iter_: The number of steps.
    """

    def __init__(
        self,
        target_range: tuple[float, float] | None = None,
        *,
        epsilon: float | None = 3.0,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        model: models.Kind = "linear",
        columns: Mapping[str, str] | None = None,
        epochs: int = 40,
        batch_size: int | None = None,
        learning_rate: float | Literal["auto"] = "auto",
        random_state: Any = None,
    ) -> None:
        super().__init__(
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=noise_multiplier,
            model=model,
            columns=columns,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            random_state=random_state,
        )
        self.target_range = target_range

    def fit(self, X: Any, y: Any) -> Self:
        """Train on a data frame or array, [rows, columns], and the target of each row, [rows]."""
        columns, y = _pairs(self, X, y)
        if self.target_range is None:
            remedy = "give one that is known without looking at the data, such as (0, 100); y must not choose it"
            raise check.refuse("target_range", None, "the public range (low, high) of y", remedy)
        low, high = map(float, self.target_range)
        if not -math.inf < low < high < math.inf:
            raise check.refuse("target_range", (low, high), "(low, high) with low < high", "such as (0, 100)")
        targets = np.asarray(y, dtype=np.float64)
        _refuse_unknown(targets)
        return self._fit(columns, targets, _squared_errors, interval=(low, high))

    def predict(self, X: Any) -> Floats:
        """Return the predicted number of each row, [rows]."""
        check_is_fitted(self)
        return self.predictor_.predict(self._features(X, reset=False))


def _refuse_unknown(y: NDArray[Any]) -> None:
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise check.Refusal("y holds NaN or infinity; leave out these rows")
    if y.dtype.kind == "O" and any(map(is_missing, y)):
        raise check.Refusal("y holds missing values; leave out these rows")


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().squeeze(1)


def _batch_size(num_rows: int) -> int:
    """Return a batch size from the number of rows, which is public."""
    return min(1024, max(math.ceil(num_rows / 3), min(num_rows, 16)))


def _pairs(estimator: _PrivateEstimator, X: Any, y: Any) -> tuple[dict[str, Any], NDArray[Any]]:
    """Return the columns and the targets of as many rows."""
    if y is None:
        name = type(estimator).__name__
        raise ValueError(f"requires y to be passed, but the target y is None: call {name}().fit(X, y)")
    columns = estimator._features(X, reset=True)
    y = column_or_1d(y, warn=True)
    rows = len(next(iter(columns.values()))) if columns else 0
    if len(y) != rows:
        raise check.refuse("length of y", len(y), f"{rows}, the number of rows of X", "give one target for each row")
    return columns, y
