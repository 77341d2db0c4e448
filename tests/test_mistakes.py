"""Typical mistakes of users of Keras, PyTorch and scikit-learn: each line is accepted, or answered with what to write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import calcvm as cv
from calcvm import hints, nn

N, A, C, S, W = hints.UnknownName, hints.UnknownArgument, cv.CalcError, cv.ShapeError, cv.CalcWarning
JOIN = "evaluate, predict and validation take arrays, only fit takes batches, fit(batches): join them, np.concatenate([x for x, _ in batches])"
# what was written, the error (None: it is accepted), and a part of the message
MISTAKES: list[tuple[str, type | None, str]] = [
    # ---- names of layers
    ("nn.Dense(8)", N, "nn.Linear"),
    ("nn.Conv2D(16, 3)", N, "nn.Conv2d"),
    ("nn.MaxPooling2D(2)", N, "nn.MaxPool2d"),
    ("nn.AveragePooling2D(2)", N, "nn.AvgPool2d"),
    ("nn.GlobalAveragePooling2D()", N, "nn.GlobalAvgPool"),
    ("nn.BatchNormalization()", N, "nn.BatchNorm"),
    ("nn.Input((4,))", N, "cv.Model(..., input_shape=(4,))"),
    ('nn.Activation("relu")', A, "take the layer of its name, such as nn.ReLU()"),
    ("nn.LSTM(8)", None, ""),
    ("nn.LSTM(10, 3)", A, "PyTorch's nn.LSTM(16, 64) is nn.LSTM(64)"),
    ("nn.GRU(input_size=10, hidden_size=3)", A, "leave it out"),
    ("nn.RNN(3, batch_first=True)", A, "the batch always comes first"),
    ("nn.LSTM(units=8)", A, "hidden_size"),
    ("nn.SimpleRNN(8)", N, "nn.RNN"),
    ("nn.Bidirectional(nn.LSTM(8))", N, "bidirectional=True"),
    ("nn.Rescaling(1 / 255)", N, "nn.Scale"),
    ("nn.Normalization()", N, "nn.Standardize"),
    ("nn.Add()", N, "nn.Residual"),
    ("nn.Identity()", N, "nn.Sequential()"),
    ('nn.RandomFlip("horizontal")', N, "nn.RandomHorizontalFlip"),
    ("nn.BatchNorm2d(16)", N, "nn.BatchNorm"),
    ("nn.BatchNorm(16)", A, "the input's sizes are known, write nn.BatchNorm()"),
    ("nn.BatchNorm(num_features=16)", A, "the sizes of the input are known: leave it out"),
    ("nn.BatchNorm(epsilon=1e-3)", A, "eps="),
    ("nn.BatchNorm(momentum=0.99)", W, "momentum is the new value's share: for Keras's 0.99 write 0.01"),
    ("nn.BatchNorm(momentum=0.5)", None, ""),
    ("nn.LayerNorm(8)", A, "the input's sizes are known, write nn.LayerNorm()"),
    ("nn.LayerNorm((8,))", A, "the input's sizes are known, write nn.LayerNorm()"),
    ("nn.LayerNorm(normalized_shape=8)", A, "the sizes of the input are known: leave it out"),
    ("nn.GroupNorm(4, 16)", A, "the input's sizes are known, write nn.GroupNorm(4)"),
    ("nn.GroupNorm(num_groups=4, num_channels=16)", A, "groups="),
    ("nn.InstanceNorm2d(16)", N, "nn.InstanceNorm"),
    ("nn.Dropout(p=0.3)", A, "rate="),
    ("nn.Dropout(50)", C, "rate must be a number in [0, 1), not 50"),
    ("nn.Dropout1d(0.5)", N, "nn.Dropout2d"),
    ("nn.ReLU(inplace=True)", A, "the planner decides it: leave it out"),
    ("nn.ReLU(True)", A, "too many positional arguments"),
    ("nn.Softmax(dim=1)", A, "axis="),
    ("nn.LeakyReLU(negative_slope=0.1)", A, "alpha="),
    ("nn.Flatten(1)", A, "too many positional arguments"),
    ("nn.Flatten(start_dim=1)", A, "each sample is flattened whole: leave it out"),
    ("nn.Unflatten(1, (2, 2))", N, "nn.Reshape"),
    ("nn.Reshape((2, 2))", None, ""),
    ("nn.Reshape(target_shape=(2, 2))", A, "the sizes come one by one: nn.Reshape(8, 8)"),
    ("nn.MaxPool2d(2, 2)", None, ""),
    ("nn.MaxPool2d(kernel_size=2, stride=2)", A, "kernel="),
    ("nn.MaxPool2d(pool_size=2)", A, "kernel="),
    ("nn.AdaptiveAvgPool2d(1)", N, "nn.AdaptiveAvgPool"),
    ("nn.AdaptiveAvgPool(output_size=1)", A, "size="),
    ("nn.AdaptiveAvgPool((1, 1))", None, ""),
    ("nn.Upsample(scale_factor=2)", A, "scale="),
    # ---- layers with weights
    ("nn.Linear(4, 8)", A, "PyTorch's nn.Linear(4, 8) is nn.Linear(8)"),
    ("nn.Linear(4, 8, False)", A, "PyTorch's nn.Linear(4, 8) is nn.Linear(8)"),
    ("nn.Linear(in_features=4, out_features=8)", A, "the sizes of the input are known: leave it out, nn.Linear(units)"),
    ("nn.Linear(4, out_features=8)", A, "PyTorch's nn.Linear(4, 8) is nn.Linear(8)"),
    ("nn.Linear(out_features=8)", A, "units="),
    ("nn.Linear(8, use_bias=False)", A, "bias="),
    ('nn.Linear(8, "relu")', A, "nn.Linear(8) >> nn.ReLU()"),
    ('nn.Linear(8, activation="relu")', A, "it is a separate layer: nn.Linear(8) >> nn.ReLU()"),
    ('nn.Linear(8, kernel_initializer="he_normal")', A, "init="),
    ('nn.Linear(8, init="he_normal")', None, ""),
    ('nn.Linear(8, init="glorot_uniform")', None, ""),
    ('nn.Linear(8, init="kaiming_normal")', None, ""),
    ("nn.Linear()", A, "PyTorch's nn.Linear(4, 8) is nn.Linear(8)"),
    ('nn.Linear(8, device="cuda")', A, "it is the model's: cv.Model(..., device=...)"),
    ("nn.Linear(8, input_shape=(4,))", A, "it is the model's: cv.Model(..., input_shape=(4,))"),
    ("nn.Conv2d(3, 16, 3)", A, "PyTorch's nn.Conv2d(3, 16, 3) is nn.Conv2d(16, 3)"),
    ("nn.Conv2d(3, 16, (3, 3))", A, "PyTorch's nn.Conv2d(3, 16, 3) is nn.Conv2d(16, 3)"),
    ("nn.Conv2d(3, 16, 3, 1, 1)", A, "PyTorch's nn.Conv2d(3, 16, 3) is nn.Conv2d(16, 3)"),
    ("nn.Conv2d(3, 16, kernel_size=3)", A, "PyTorch's nn.Conv2d(3, 16, 3) is nn.Conv2d(16, 3)"),
    ("nn.Conv2d(3, 16, kernel=3)", A, "PyTorch's nn.Conv2d(3, 16, 3) is nn.Conv2d(16, 3)"),
    ("nn.Conv2d(in_channels=3, out_channels=16, kernel_size=3)", A, "channels are those of the input: leave it out"),
    ("nn.Conv2d(filters=16, kernel_size=3)", A, "channels="),
    ('nn.Conv2d(16, (3, 3), activation="relu")', A, "it is a separate layer: nn.Conv2d(8, 3) >> nn.ReLU()"),
    ("nn.Conv2d(16, 3, strides=2)", A, "stride="),
    ('nn.Conv2d(16, 3, padding="same")', None, ""),
    ('nn.Conv2d(16, 3, data_format="channels_last")', A, "it is the model's: cv.Model(..., channels_last=True)"),
    ("nn.Conv2d(16)", A, "PyTorch's nn.Conv2d(3, 16, 3) is nn.Conv2d(16, 3)"),
    ("nn.Conv1d(4, 8, 3)", A, "PyTorch's nn.Conv1d(3, 16, 3) is nn.Conv1d(16, 3)"),
    ("nn.Conv3d(3, 16, 3)", A, "PyTorch's nn.Conv3d(3, 16, 3) is nn.Conv3d(16, 3)"),
    ("nn.ConvTranspose2d(16, 8, 2, stride=2)", A, "PyTorch's nn.ConvTranspose2d(3, 16, 3) is nn.ConvTranspose2d(16, 3)"),
    ("nn.ConvTranspose2d(16, 8, 2, 2)", A, "PyTorch's nn.ConvTranspose2d(3, 16, 3) is nn.ConvTranspose2d(16, 3)"),
    # ---- networks
    ("nn.Sequential([nn.Linear(8), nn.ReLU()])", None, ""),
    ("nn.Sequential(nn.Linear, nn.ReLU)", C, "not the class Linear (write Linear(...))"),
    ("nn.Linear(8) >> nn.ReLU", C, "not the class ReLU (write ReLU(...))"),
    ("nn.Linear(8) >> cv.relu", C, "a layer of calcvm.nn, such as nn.ReLU(), is wanted"),
    ('nn.Linear(8) >> "relu"', C, "a layer of calcvm.nn, such as nn.ReLU(), is wanted, not 'relu' (str)"),
    ("nn.Linear(8)(X)", C, "a cv.Model of them has predict(X)"),
    ("nn.Sequential().add(nn.Linear(8))", N, "nn.Linear(8) >> nn.ReLU(), or a list"),
    ("nn.Sequential(nn.Linear(8)).parameters()", N, "a model of the layers: cv.Model(net, input_shape=..., optimizer=...)"),
    ('nn.Sequential(nn.Linear(8)).compile(optimizer="adam")', N, "a model of the layers: cv.Model(net, input_shape=..., optimizer=...)"),
    ("nn.Sequential(nn.Linear(8)).fit(X, Y)", N, "a model of the layers: cv.Model(net, input_shape=..., optimizer=...)"),
    ("nn.functional.relu(X)", N, "cv.relu and other functions of cv"),
    ("cv.relu(X)", C, "at least one input must be a variable of a graph, not ndarray of shape (40, 4)"),
    # ---- models
    ('cv.Model([nn.Linear(8), nn.ReLU(), nn.Linear(3)], input_shape=(4,), optimizer="adam")', None, ""),
    ('cv.Model(nn.Linear(3), (4,), optimizer="adam")', A, "too many positional arguments"),
    ('cv.Model(nn.Linear(3), optimizer="adam")', C, "input_shape is missing; give input_shape=(784,)"),
    ('cv.Model(nn.Linear(3), input_shape=4, optimizer="adam")', S, "write (4,)"),
    ("cv.Model(nn.Linear(3), input_shape=(4,))", C, "optimizer is missing; give optimizer=cv.Adam(1e-3)"),
    ('cv.Model(nn.Linear(3), input_shape=(None, 4), optimizer="adam")', S, "the batch is added to it"),
    ('cv.Model(nn.Linear(3), input_shape=(4,), optimizer="adam", lr=0.1)', A, "it is the optimizer's: cv.Adam(1e-3), later model.hyper[\"learning_rate\"]"),
    ('cv.Model(nn.Linear, input_shape=(4,), optimizer="adam")', C, "not the class Linear (write Linear(...))"),
    ("cv.Model(inputs=nn.Linear(3), outputs=nn.Linear(3))", A, "net="),
    # ---- losses, optimizers, metrics
    ('made(criterion="mse")', A, "loss="),
    ('made(loss="sparse_categorical_crossentropy")', C, "'softmax_cross_entropy'"),
    ('made(loss="categorical_crossentropy")', C, "'softmax_cross_entropy'"),
    ('made(loss="cross_entropy")', C, "'softmax_cross_entropy'"),
    ('made(loss="CrossEntropyLoss")', C, "'softmax_cross_entropy'"),
    ("made(loss=nn.CrossEntropyLoss())", N, 'cv.Model(..., loss="softmax_cross_entropy")'),
    ('made(nn.Linear(1), loss="binary_crossentropy")', C, "'binary_cross_entropy'"),
    ('made(nn.Linear(1), loss="BCEWithLogitsLoss")', C, "'binary_cross_entropy'"),
    ('made(loss="mean_squared_error")', C, "'mse'"),
    ('made(loss="MSE")', C, "'mse'"),
    ("made(loss=nn.MSELoss())", N, 'cv.Model(..., loss="mse")'),
    ('made(loss="mean_absolute_error")', C, "'mae'"),
    ('made(loss="l1")', C, "'mae'"),
    ('made(loss="nll")', C, "'softmax_cross_entropy'"),
    ('made(loss="hinge")', C, "or a function, such as cv.log_cosh"),
    ('made(loss="log_loss")', C, "'softmax_cross_entropy'"),
    ("made(loss=np.mean)", C, "np.mean takes arrays"),
    ("made(nn.Linear(3) >> nn.Softmax())", W, "leave that out (model.predict_proba gives the probabilities)"),
    ('made(nn.Linear(1) >> nn.Sigmoid(), loss="binary_cross_entropy")', W, "leave that out (model.predict_proba gives the probabilities)"),
    ('made(optimizer="Adam")', None, ""),
    ('made(optimizer="rmsprop")', None, ""),
    ('made(optimizer="RMSprop")', None, ""),
    ('made(optimizer="momentum")', C, "take one of 'sgd', 'adam'"),
    ('made(optimizer="nadam")', C, "'adam'"),
    ('made(optimizer="lbfgs")', C, "take one of 'sgd', 'adam'"),
    ("made(optimizer=cv.Adam)", None, ""),
    ("made(optimizer=cv.SGD)", C, "give optimizer=cv.SGD(0.1)"),
    ("made(optimizer=1e-3)", C, "one such as cv.Adam(1e-3)"),
    ("cv.Adam(lr=1e-3)", A, "learning_rate="),
    ('cv.Adam("1e-3")', C, "learning_rate must be a number >= 0, not '1e-3'"),
    ("cv.Adam(made().parameters, lr=1e-3)", A, "learning_rate="),
    ("cv.Adam(1e-3, betas=(0.9, 0.999))", A, "they are two: beta1= and beta2="),
    ("cv.SGD(0.1, 0.9, nesterov=True)", None, ""),
    ("cv.SGD(lr=0.1, momentum=0.9)", A, "learning_rate="),
    ("cv.Adam(1e-3).step()", N, "model.step(x, y)"),
    ("cv.Adam(1e-3).zero_grad()", N, "model.step(x, y), which computes new gradients"),
    ("cv.Adam(learning_rate=cv.ExponentialDecay(1e-3, 10, 0.9))", N, "cv.Exponential"),
    ("cv.optim.RMSprop(1e-3)", N, "cv.RMSProp"),
    ("cv.optim.lr_scheduler.StepLR", N, "cv.Adam(1e-3, schedule=cv.Cosine(1000))"),
    ('made(metrics=["acc"])', C, "'accuracy'"),
    ('made(metrics="accuracy")', C, "is wanted, not 'accuracy'"),
    ('made(metrics=["sparse_categorical_accuracy"])', C, "'accuracy'"),
    ('made(metrics=["mean_absolute_error"])', C, "'mae'"),
    ('made(metrics=["auc"])', C, "accuracy, mse, mae, huber, rmse"),
    # ---- training
    ('made().compile(optimizer="adam", loss="mse")', N, "cv.Model(net, input_shape=..., loss=..., optimizer=...)"),
    ("made().fit(X, Y, batch_size=8)", A, "it is the model's: cv.Model(..., batch_size=32)"),
    ("made().fit(X, Y, validation_data=(X, Y))", A, "validation="),
    ("made().fit(X, Y, validation_split=0.2)", A, "validation=0.2 holds a share of the samples out"),
    ("made().fit(X, Y, validation=[X, Y], progress=False)", None, ""),
    ("made().fit(X, Y, verbose=0)", A, "progress="),
    ("made().fit(X, Y, epochs=1, verbose=False)", A, "progress="),
    ("made().fit(X, Y, n_epochs=3)", A, "epochs="),
    ("made().fit(X, Y, max_iter=3)", A, "epochs="),
    ("made().fit(X, Y, callbacks=cv.EarlyStopping(), progress=False)", C, "a list of callbacks"),
    ('made().fit(X, Y, callbacks=[cv.EarlyStopping("val_loss")])', C, "give a figure by keyword: EarlyStopping(figure='val_loss')"),
    ("cv.EarlyStopping(patience=3, restore_best_weights=True)", A, "keep_best="),
    ("made().fit(X, Y, sample_weight=np.ones(40))", C, "the model's loss has no weights: make it with cv.Model(..., sample_weight=True)"),
    ('made().fit(X, Y, class_weight="balanced")', C, "the model's loss has no weights: make it with cv.Model(..., sample_weight=True)"),
    ("made().fit((X, Y))", C, "arrays for X and y come one by one: fit(X, y), and not fit((X, y))"),
    ("made().fit([X, Y], progress=False)", C, "arrays for X and y come one by one: fit(X, y), and not fit((X, y))"),
    ("made().fit(X, progress=False)", C, "an array of samples is wanted, not None; batches, one by one, are tuples (X, y)"),
    ('made().fit(X, Y, progress=False).history["loss"]', N, 'history["loss"]'),
    ('made().fit(X, Y, progress=False)["accuracy"]', C, "cv.Model(..., train_metrics=True) metrics of the training data"),
    ('made().fit(X, Y, progress=False)["acc"]', C, "cv.Model(..., train_metrics=True) metrics of the training data"),
    ("made().fit(X, Y, 8, 3)", A, "epochs are given by name, fit(X, y, epochs=10)"),
    ("made().fit(X, Y, 32)", A, "the batch size to the model, cv.Model(..., batch_size=32)"),
    ("made().train_on_batch(X[:8], Y[:8])", N, "step"),
    ("made().step(X, Y)", C, "a batch of 40 is above the planned 8; compile with batch_size=40 or give smaller batches"),
    ("made().step(X[:8])", C, "step takes 2 arrays (input, target), not 1"),
    ("made().fit(X, Y + 1, progress=False)", C, "indexes and labels must be integers in [0, 3); found 1 to 3, 3 at index (2,)"),
    ("made().fit(X, Y - 1, progress=False)", C, "indexes and labels must be integers in [0, 3); found -1 to 1, -1 at index (0,)"),
    ("made().fit(X, np.eye(3)[Y], progress=False)", S, "for one number per class, give a target_shape"),
    ("made().fit(X, Y[:, None], progress=False)", S, "write np.asarray(y)[:, 0]"),
    ("made().fit(X, Y.astype(str), progress=False)", C, "labels are np.unique(y, return_inverse=True)[1]"),
    ("made().fit(X, Y / 2, progress=False)", C, "indexes and labels must be integers in [0, 3); found 0.5"),
    ("made().fit(X, Y[:30], progress=False)", S, "X has 40 samples, y has 30"),
    ("made().fit(X[:, :3], Y, progress=False)", S, "data of shape (40, 3) do not fit (B, 4)"),
    ("made().fit(X.T, Y, progress=False)", S, "X has 4 samples, y has 40"),
    ('made(loss="mse").fit(X, Y, progress=False)', S, "labels are for softmax_cross_entropy, this loss takes np.eye(3)[labels]"),
    ('made(nn.Linear(1), loss="mse").fit(X, Y, progress=False)', None, ""),
    ('made(nn.Linear(1), loss="binary_cross_entropy").fit(X, Y, progress=False)', C, "binary_cross_entropy takes targets in [0, 1]; found 0 to 2"),
    ('made(nn.Linear(1), loss="binary_cross_entropy").fit(X, Y > 0, progress=False)', None, ""),
    ('made(nn.Linear(2), loss="binary_cross_entropy").fit(X, Y > 0, progress=False)', S, "labels are for softmax_cross_entropy, this loss takes np.eye(2)[labels]"),
    # ---- trained models
    ("made().predict(X[0])", S, "write data[None] for one sample"),
    ("made().predict(X.tolist())", None, ""),
    ("made().predict(X, batch_size=8)", A, "it is the model's: cv.Model(..., batch_size=32)"),
    ("made().predict(X, verbose=0)", A, "it prints nothing: leave it out"),
    ("made()(X)", C, "model.predict(X) returns its outputs, and layers are composed by >> before it is made"),
    ("made().forward(X)", C, "of data, model.predict(X) gives the outputs"),
    ("made().eval()", N, "predict, which is without dropout"),
    ("made().train()", N, "fit"),
    ('made().to("cuda")', N, 'cv.Model(..., device="cuda")'),
    ("made().load_state_dict(made().state_dict())", None, ""),
    ("made().load_state_dict(made().get_weights())", C, "linear_1.weight is a name of get_weights: use set_weights"),
    ("made().parameters()", C, "model.parameters[name]; the optimizer is the model's"),
    ('made().set_weights({"0.weight": np.ones((3, 4))})', C, "no parameter is called '0.weight'; the parameters are linear_1.weight, linear_1.bias"),
    ("made().score(X, Y)", N, "evaluate"),
    ("made().evaluate(X, Y, batch_size=8)", A, "it is the model's: cv.Model(..., batch_size=32)"),
    ("made().learning_rate", N, 'hyper["learning_rate"]'),
    ("made().optimizer.lr", N, "hyper, of its numbers"),
    ("made().save()", A, "missing a required argument: 'path'"),
    ('made().save_weights("weights.h5")', N, "save"),
    ("made().layers[0]", N, "summary"),
    ('made().get_layer("linear_1")', N, "parameters"),
    ("made().trainable = False", N, "nn.Linear(..., trainable=False) freezes"),
    ("made().coef_", N, "parameters"),
    ("made().clone()", N, "did you mean copy?"),
    ("made().run_steps(steps=3)", A, "did you mean n=?"),
    ("made().run_steps(verbose=1)", A, "it prints nothing"),
    ("made().summary(steps=3)", A, "it takes none"),
    ("made().hyper()", A, "model.hyper(path)"),
    ("made().hyper.learning_rate", N, 'did you mean model.hyper["learning_rate"]?'),
    ("made().hyper.lr = 1e-3", N, 'did you mean model.hyper["learning_rate"]?'),
    ("cv.Ensemble([made()]).fit(X, Y)", N, "fit of each model, before cv.Ensemble(models)"),
    ("cv.Ensemble(fleet().handles)", C, "a list of models, such as [model] or fleet.results.best(5), is wanted"),
    ("fleet().results.best(key='loss')", A, "did you mean by=?"),
    ("fleet().results['net']", C, "results['net']: give a place or a slice; by its name it is fleet.handles['net']"),
    ("fleet().handles['net'].predict(X)", N, "did you mean handle.model.predict?"),
    ("fleet().handles['net']['predict']", C, "read handle.model.predict in place of ['predict']"),
    ("fleet().handles['net'].stop(why='slow')", A, "it takes reason"),
    ("split().fit(X, Y)", N, "did you mean step, on one batch after the other?"),
    ("split().predict(X)", N, 'did you mean run("predict", X), on one batch?'),
    ("split().hyper", N, "cv.SGD(0.1) of the graph, fixed by the plan"),
    # ---- batches where arrays are wanted
    *((line.format(data), C, JOIN) for data in ("BATCHES", "iter(BATCHES)", "Loader()") for line in (
        "made().evaluate({})", "made().predict({})", "made().predict_classes({})", "made().fit(X, Y, validation={}, progress=False)",
        "cv.Ensemble([made()]).predict({})", "fleet(validation={})",
    )),
    ("made().predict([x for x, _ in BATCHES])", S, JOIN),
    ("made().fit(X, Y, validation=BATCHES[:2], progress=False)", S, JOIN),
    ("made().fit(X, Y, validation=(X, Y, Y), progress=False)", C, "there are no sample weights in validation"),
    ("made().predict([[1.0, 2.0], [1.0]])", S, "its rows differ in shape"),
    # ---- functions
    ('cv.load("nothing.calc")', cv.NoSuchFile, "cannot be read (No such file or directory): look at the path"),
    ('cv.load_model("nothing.calc")', N, "cv.load"),
    ('cv.save(made(), "model.calc")', N, "model.save(path)"),
    ("cv.no_grad()", N, "model.predict, which computes no gradients"),
    ('cv.device("cuda")', N, 'cv.Model(..., device="cuda")'),
    ("cv.manual_seed(0)", N, "cv.Model(..., seed=0)"),
    ("cv.utils.data.DataLoader(X)", N, "model.fit(X, y), or an iterable of batches"),
    ("cv.DataLoader(X)", N, "model.fit(X, y), or an iterable of batches"),
    ("cv.Sequential()", N, "nn.Sequential"),
    ("cv.Linear(3)", N, "nn.Linear"),
    ("cv.tensor(X)", N, "NumPy's arrays, as they are"),
    ("cv.from_numpy(X)", N, "NumPy's arrays, as they are"),
    ("cv.train_test_split(X, Y)", N, "calcvm.data.train_test_split"),
    ("cv.StandardScaler()", N, "nn.Standardize"),
    ("cv.MLPClassifier()", N, "calcvm.sklearn.MLPClassifier"),
    ("cv.fit(X, Y)", N, "cv.Model(net, ...).fit"),
    # ---- images
    ("image(nn.Conv2d(4, 3) >> nn.ReLU() >> nn.Linear(3))", W, "nn.Flatten() before it"),
    ("image(nn.Conv2d(4, 3) >> nn.MaxPool2d(2) >> nn.Linear(10))", W, "nn.Flatten() before it"),
    ('image(nn.Conv2d(4, 3) >> nn.ReLU() >> nn.Linear(3), loss="mse")', W, "nn.Flatten() before it"),
    ("image(nn.Flatten() >> nn.Linear(3), input_shape=(12, 12, 3))", None, ""),
    ("image(nn.Conv2d(4, 3) >> nn.Flatten() >> nn.Linear(3), input_shape=(12, 12))", S, "the input input (B, 12, 12) is not (N, channels, 2 sizes): with one channel it is (N, 1, ...)"),
    ("image(nn.Conv2d(4, 3) >> nn.Flatten() >> nn.Linear(3), input_shape=(12, 12, 3))", W, "give channels_last=True"),
    ("image(nn.Conv2d(4, 3) >> nn.Flatten() >> nn.Linear(3)).fit(I.transpose(0, 2, 3, 1), L, progress=False)", S, "their channels are last, which channels_last=True is for"),
    ("image(nn.Conv2d(4, 3) >> nn.Flatten() >> nn.Linear(3)).predict(I[0])", S, "write data[None] for one sample"),
    ("image(nn.Linear(8) >> nn.Conv2d(4, 3))", None, ""),
    ("image(nn.Conv2d(4, 15) >> nn.Flatten() >> nn.Linear(3))", S, "the window (15, 15) of weights is larger than x (B, 3, 12, 12) with its padding"),
    # ---- graphs
    ('cv.Model(graph(paths=("train", "predict")), batch_size=8)', C, "this has no path 'learn', but train, predict: rename one"),
    ('cv.Model(graph(paths=("learn", "test")), batch_size=8)', C, "this has no path 'predict', but learn, test: rename one"),
    ("cv.Model(graph(output=False), batch_size=8).fit(X, X[:, :3], progress=False)", C, "because minimize(...) of 'learn' has no output="),
    ('cv.Model(graph(), batch_size=8, loss="mse")', C, "a custom graph has its loss already: leave it out"),
    ("cv.Model(cv.CalcGraph())", C, "this has no paths: add them with g.path(name)"),
    ('cv.CalcGraph().parameter("w", (None, 4))', S, "it has no batch: give a number for None, or leave None out"),
    ('cv.CalcGraph().buffer("w", (None, 4))', S, "it has no batch: give a number for None, or leave None out"),
    ("line(lambda x: cv.split(x, 2))", A, "give axis=, such as axis=1"),
    ("line(lambda x: x.cumsum())", A, "give axis=, such as axis=1"),
    ("line(lambda x: cv.cumsum(x, reverse=True))", A, "give axis=, such as axis=1"),
    ("line(lambda x: cv.logcumsumexp(x))", A, "give axis=, such as axis=1"),
    ("line(lambda x: cv.split(x, [2, 2, 2], axis=1))", S, "[2, 2, 2] are places of cuts, not sizes, and leave a part without elements: for parts of these sizes write [2, 4]"),
    ("line(lambda x: cv.split(x, [4, 2], axis=1))", S, "for parts of these sizes write [4]"),
    ("line(lambda x: cv.split(x, [0, 3], axis=1))", S, "leave a part without elements"),
    ("line(lambda x: cv.split(x, [2, 4], axis=1)[0])", None, ""),
    ("line(lambda x: cv.softmax(x, axis=0))", S, "softmax runs over the last axis, or axis 1: transpose first"),
    ("line(lambda x: cv.log_softmax(x, axis=5))", S, "softmax runs over the last axis, or axis 1: there are 2 dimensions"),
    ("line(lambda x: cv.clip(x, None, 2))", C, "lo=None is not allowed (the least value; for hi alone write cv.minimum(x, hi))"),
    ("line(lambda x: cv.clip(x, 0.5, None))", C, "for lo alone write cv.maximum(x, lo)"),
    ("line(lambda x: cv.transpose(x, (0, -3)))", S, "axes (0, -3) are not a permutation"),
    ('line(lambda x: cv.relu(x, name="a"))', A, 'y.rename("name") names a result'),
    ("Own(lambda layer, x: layer.parameter('a', (4,))).build(line(), 'own', True)", A, "Own.parameter takes (x, name, shape, init)"),
    ("Own(lambda layer, x: layer.parameter('a', x, (4,))).build(line(), 'own', True)", C, 'its input first, self.parameter(x, "name", shape), is wanted, not \'a\''),
    ("Own(lambda layer, x: layer.buffer('a', x, (4,))).build(line(), 'own', True)", C, 'its input first, self.buffer(x, "name", shape)'),
    ("cv.compile(graph())", cv.PlanError, "how large may a batch be?"),
    ("cv.plan(nn.Linear(3), batch_size=8)", C, "a graph (cv.CalcGraph, cv.build_graph) is wanted"),
    ("cv.compile(nn.Linear(3), batch_size=8)", C, "a graph (cv.CalcGraph, cv.build_graph) is wanted"),
    ("cv.Resident", N, "cv.Model"),
    ("cv.TensorDescriptor", N, "x.descriptor, of a variable x"),
    ("cv.OpSpec", N, "calcvm.operators.OpSpec"),
    ("cv.RowSpec", N, "calcvm.operators.RowSpec"),
]  # fmt: skip
X = np.random.default_rng(0).standard_normal((40, 4)).astype("float32")
Y = np.arange(40) % 3
I = np.random.default_rng(0).standard_normal((8, 3, 12, 12)).astype("float32")  # noqa: E741
L = np.arange(8) % 3
BATCHES = [(X[:16], Y[:16]), (X[16:32], Y[16:32]), (X[32:], Y[32:])]


class Loader:
    """As PyTorch's: it has batches and a length, and takes no places."""

    def __iter__(self) -> Any:
        return iter(BATCHES)

    def __len__(self) -> int:
        return len(BATCHES)


class Own(nn.Layer):
    def __init__(self, make: Any) -> None:
        self._make = make

    def build(self, x: Any, scope: str, training: bool) -> Any:
        return x * self._make(self, x)


def line(of: Any = lambda x: x) -> Any:
    """A function of a variable (B, 6), in a path."""
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 6))
    g.path("line").__enter__()
    return of(x)


def fleet(**options: Any) -> cv.Fleet:
    f = cv.Fleet("1 MiB", workers=1)
    f.add(nn.Linear(3), data=(X, Y), name="net", input_shape=(4,), optimizer=cv.SGD(0.1), batch_size=8, **options)
    return f


def split() -> cv.SplitModel:
    devices = [cv.Processor(name, memory="1 MiB") for name in "ab"]
    return cv.SplitModel(cv.plan_devices(cv.build_graph(nn.Linear(3), (4,), "mse", cv.SGD(0.1)), devices, batch_size=8))


def made(net: Any = None, **options: Any) -> cv.Model:
    return cv.Model(
        net or nn.Linear(3), **{"input_shape": (4,), "optimizer": "adam", "batch_size": 8, "workers": 1, **options}
    )


def image(net: nn.Layer, **options: Any) -> cv.Model:
    return made(net, **{"input_shape": (3, 12, 12), **options})


def graph(paths: tuple[str, str] = ("learn", "predict"), output: bool = True) -> cv.CalcGraph:
    g = cv.CalcGraph()
    x, t, w = g.placeholder("x", (None, 4)), g.placeholder("t", (None, 3)), g.parameter("w", (4, 3))
    with g.path(paths[0], backward=True) as learn:
        y = x @ w
        learn.minimize(cv.mse(y, t), cv.SGD(0.1), output=y if output else None)
    with g.path(paths[1]) as predict:
        predict.output = cv.sigmoid(y)
    return g


@pytest.mark.parametrize(("line", "kind", "message"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_answered_with_what_to_write(line: str, kind: type | None, message: str) -> None:
    if kind is None:
        exec(line, globals())
        return
    with pytest.raises(kind) as told:
        exec(line, globals())
    assert message in str(told.value), str(told.value)
    assert "\n" not in str(told.value)


# Parameters of other libraries, by a call that lacks them.
PARAMETERS = {
    "nn.Linear(8, {}=1)": "in_features out_features use_bias activation kernel_initializer bias_initializer kernel_regularizer "
    "input_shape input_dim device dtype name",
    "nn.Conv2d(8, 3, {}=1)": "in_channels out_channels filters kernel_size strides dilation_rate use_bias activation data_format "
    "kernel_initializer bias_initializer kernel_regularizer input_shape device dtype name",
    "nn.ConvTranspose2d(8, 3, {}=1)": "in_channels out_channels filters kernel_size strides dilation_rate use_bias data_format",
    "nn.MaxPool2d({}=2)": "kernel_size pool_size strides return_indices data_format name",
    "nn.AvgPool2d(2, {}=2)": "kernel_size pool_size strides data_format",
    "nn.AdaptiveAvgPool({}=1)": "output_size",
    "nn.BatchNorm({}=1)": "num_features epsilon center scale elementwise_affine track_running_stats device dtype name",
    "nn.LayerNorm({}=1)": "normalized_shape epsilon elementwise_affine center scale",
    "nn.GroupNorm(4, {}=1)": "num_groups num_channels epsilon",
    "nn.Dropout({}=0.5)": "p prob inplace seed name",
    "nn.ReLU({}=1)": "inplace name",
    "nn.LeakyReLU({}=0.1)": "negative_slope inplace",
    "nn.Softmax({}=1)": "dim",
    "nn.PReLU({}=1)": "num_parameters",
    "nn.Flatten({}=1)": "start_dim end_dim data_format",
    "nn.Reshape({}=(2, 2))": "target_shape",
    "nn.Upsample({}=2)": "scale_factor data_format",
    "cv.Adam({}=1)": "lr params betas beta_1 beta_2 epsilon decay clipnorm global_clipnorm clipvalue amsgrad",
    "cv.SGD(0.1, {}=1)": "lr params decay clipnorm",
    "cv.RMSProp({}=1)": "lr rho epsilon",
    "cv.Step(10, {}=1)": "decay_rate",
    "cv.Cosine({}=1)": "T_max decay_steps eta_min",
    "cv.CosineRestarts({}=1)": "T_0 T_mult eta_min",
    "cv.EarlyStopping({}=1)": "monitor mode restore_best_weights verbose threshold",
    "cv.ReduceOnPlateau({}=1)": "monitor mode min_lr verbose threshold",
    "made({}=1)": "criterion loss_fn optim optimiser lr learning_rate inputs outputs layers random_state n_jobs num_workers input_dim "
    "weighted_metrics",
    "made().fit(X, Y, {}=1)": "batch_size verbose validation_data validation_split eval_set nb_epoch n_epochs num_epochs max_epochs max_iter "
    "early_stopping callback weights steps learning_rate",
    "made().predict(X, {}=1)": "batch_size verbose steps",
    "made().evaluate(X, Y, {}=1)": "batch_size verbose sample_weight",
}


@pytest.mark.parametrize(("call", "names"), PARAMETERS.items())
def test_parameters_of_other_libraries_are_named_or_left_out(call: str, names: str) -> None:
    unanswered = {}
    for name in names.split():
        with pytest.raises(A) as told:
            eval(call.format(name))
        if "it takes" in str(told.value):  # no more than a list of all
            unanswered[name] = str(told.value)
    assert not unanswered
