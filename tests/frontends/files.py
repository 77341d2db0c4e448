"""Files of ONNX for tests: from texts, and by PyTorch's exporters."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings

import numpy as np
import torch
from onnx import numpy_helper, parser

HEAD = '<ir_version: 10, opset_import: ["" : 22]>'


def parsed(text, **weights):
    model = parser.parse_model(f"{HEAD} {text}")
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
    return model


def exported(module, inputs, axes, exporter):
    """A module as a file, by PyTorch's exporters: the older one in the form of inference or of training, and the newer one."""
    names, file = [f"x{k}" for k in range(len(inputs))], io.BytesIO()
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            if exporter == "program":
                batch = tuple({a: torch.export.Dim("batch")} if a is not None else None for a in axes)
                more = tuple(
                    torch.cat([x, x], a) if a is not None and x.shape[a] == 1 else x for x, a in zip(inputs, axes)
                )
                how = {"dynamo": True, "dynamic_shapes": batch, "input_names": names, "verbose": False}
                return torch.onnx.export(module.eval(), more, **how).model_proto
            trains, modes = exporter == "training", torch.onnx.TrainingMode
            how = {
                "dynamo": False, "input_names": names, "opset_version": 17, "do_constant_folding": not trains,
                "dynamic_axes": {n: {a: "batch"} for n, a in zip(names, axes) if a is not None},
                "training": modes.TRAINING if trains else modes.EVAL,
            }  # fmt: skip
            torch.onnx.export(module.train(trains), tuple(inputs), file, **how)
            return file.getvalue()
        finally:
            logging.disable(logging.NOTSET)
