"""The formulas of the claims, as TeX, by the id of the claim; the others need no more than their statement."""

FORMULAS = {
    "lemma1-threshold": r"\tau \le \Vert\nabla f(x)\Vert + \sigma (1-p)^{-1/q}",
    "lemma1-bias": r"\Vert \mathbb{E}[\alpha g] - \mathbb{E}[\alpha]\nabla f(x) \Vert \le \sigma (1-p)^{1-1/q}",
    "lemma1-proof-step": r"P(\Vert\delta\Vert > Q) \le \Big(\frac{\mathbb{E}\Vert\delta\Vert}{Q}\Big)^q",
    "lemma2-recursion": r"\mathbb{E} f(x_{t+1}) - f(x_t) \le -\gamma\Big(a - \frac\beta2 - \gamma L\Big) G^2"
    r" + \frac{\gamma}{2\beta}\sigma^2 h^{2-2/q} + \gamma^2 L \sigma^2 h^{-2/q}",
    "theorem1-constant": r"\frac cT \sum_t \mathbb{E}G_t^2 \le \frac{2F_0}{\gamma T} + 2\gamma L\sigma^2 h^{-2/q}"
    r" + \frac{\sigma^2 h^{2-2/q}}{\beta}",
    "theorem1-varying": r"\frac c\Gamma \sum_t \gamma_t \mathbb{E}G_t^2 \le \frac{2F_0}{\Gamma}"
    r" + \frac{\sigma^2}{\Gamma}\sum_t \gamma_t h_t^{-2/q}\Big(2L\gamma_t + \frac{h_t^2}{\beta}\Big)",
    "two-point-printed": r"x^\dagger = -\frac{\omega}{1-\omega}",
    "fixed-clip-fixed-point": r"x = -\frac{p\,\tau}{1-p}",
    "theorem2-printed": r"S = \frac1B + \frac{z^2}{B^2}",
    "theorem2-corrected": r"S = \frac1B + \frac{d z^2}{B^2}, \quad \frac c\Gamma\sum_t\gamma_t\mathbb{E}G_t^2 \le"
    r" \frac{F_0}\Gamma + \frac{\sigma^2}\Gamma\sum_t\gamma_t h_t^{-2/q}"
    r"\Big[\frac{h_t^2}{2\beta} + \gamma_t L(S + h_t^2)\Big]",
    "sharp-theorem": r"\frac c\Gamma\sum_t\gamma_t\mathbb{E}G_t^2 \le \frac{F_0}\Gamma + \frac{\sigma^2}\Gamma"
    r"\sum_t\gamma_t\left\{\frac{\psi_q(p_t)}{2\beta} + \gamma_tL\Big[\frac{2^{1-q}}B\Big(h_t^{1-2/q} +"
    r" \Big(1-\frac q2\Big)h_t^{2-2/q}\Big) + S_zh_t^{-2/q}\Big]\right\}",
    "bias-floor-attained": r"\frac{\sigma^2\psi_q(p)}{p^2}, \quad"
    r" \psi_q(p) = \frac{(p(1-p))^{2-2/q}}{(p^{q-1} + (1-p)^{q-1})^{2/q}}",
    "certificate": r"\frac1\Gamma\sum_t\gamma_t\mathbb{E}G_t^2 \le \frac1c\Big[\frac{F_0}\Gamma +"
    r" \frac{\sigma^2\bar h^{2-2/q}}{2\beta} + \frac{LS}{2\Gamma}\sum_t\gamma_t^2\tau_t^2\Big]",
    "certificate-any-start": r"\Big(1 - \frac\kappa2 - \max_t\gamma_tL\frac{1-\kappa}2\Big)"
    r"\mathbb{E}\sum_t\gamma_ta_tG_t^2 \le F_0 + \frac{\sigma^2}{2\kappa}\sum_t\gamma_th_t +"
    r" \frac{LS}2\sum_t\gamma_t^2\tau_t^2",
    "momentum-same-floor": r"\gamma' = \frac{\gamma}{1-\mu}, \quad \rho_\mu = 1 + \frac{3\mu}{1-\mu},"
    r" \quad N_\mu = \frac{1+2\mu}{1+\mu}",
    "balance-without-moments": r"P(\Vert g\Vert > \tau)\;\mathbb{E}(\Vert g\Vert - \tau)_+ = \gamma L S \tau",
    "lower-bound-probes": r"0.86\,\frac{F_0}{\gamma T}, \quad \frac{\gamma L}{2} S_z \sigma^2 h^{-2/q},"
    r" \quad \frac{\sigma^2\psi_q(p)}{p^2}",
    "group-noise-allocation": r"\sigma_k^2 = z^2 \frac{\tau_k}{\sqrt{d_k}} \sum_j \tau_j \sqrt{d_j}",
}
