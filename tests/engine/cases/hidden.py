"""Functions of a user's own: what they do with a parameter is in no torch function."""

import torch


class Product(torch.autograd.Function):
    """A matrix product that neither the capture nor vmap sees into."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.transpose(-1, -2) @ grad


class Scale(torch.autograd.Function):
    """Columns times a vector, hidden from both."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).flatten(0, -2).sum(0)


class ScaleForVmap(torch.autograd.Function):
    """The same, of the sort that vmap understands."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)
