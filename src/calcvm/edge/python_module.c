/* Functions of a pack for Python, on its stable ABI.  What of Python is used is declared here: no header of it is needed.
 * pack.h, which is generated, has numbers and the rows of the two tables. */
#include "pack.h"

typedef __INTPTR_TYPE__ ssize;
static const struct array { const char *name; ssize at, bytes; char code; int rank; ssize shape[MOST_AXES]; } ARRAYS[] = ARRAY_ROWS;
static const struct function { const char *name, *what; int (*run)(void *); int n_takes, n_gives; short takes[MOST_ARRAYS], gives[MOST_ARRAYS]; }
    FUNCTIONS[] = FUNCTION_ROWS;

typedef struct object { ssize count; void *type; } PyObject;
typedef struct { PyObject base; char *data; int rank; ssize *shape, *strides; PyObject *owner, *dtype; int flags; } NumPyArray; /* NumPy's ABI */
typedef PyObject *(*Fast)(PyObject *, PyObject *const *, ssize);
typedef struct { const char *name; Fast call; int flags; const char *doc; } PyMethodDef;
typedef struct { PyObject base; void *init; ssize index; void *copy; const char *name, *doc; ssize size; PyMethodDef *methods; void *slots, *traverse, *clear, *free; } PyModuleDef;
enum { METH_FASTCALL = 0x80, API = 3, C_CONTIGUOUS = 1 };

#define PYTHON extern __attribute__((weak)) /* is not there if ctypes loads the library into another program */
PYTHON PyObject *PyFloat_FromDouble(double), *PyModule_Create2(PyModuleDef *, int), *PyCFunction_NewEx(PyMethodDef *, PyObject *, PyObject *);
PYTHON double PyFloat_AsDouble(PyObject *);
PYTHON ssize PyLong_AsSsize_t(PyObject *);
PYTHON PyObject *PyTuple_GetItem(PyObject *, ssize), *PyTuple_New(ssize), *PyObject_CallObject(PyObject *, PyObject *), *PyObject_CallFunction(PyObject *, const char *, ...);
PYTHON int PyTuple_SetItem(PyObject *, ssize, PyObject *);
PYTHON char *PyByteArray_AsString(PyObject *);
PYTHON PyObject *PyErr_Format(PyObject *, const char *, ...), *PyErr_Occurred(void);
PYTHON void Py_DecRef(PyObject *), Py_IncRef(PyObject *);
PYTHON PyObject *PyExc_ValueError, *PyExc_TypeError, PyFloat_Type, PyLong_Type;

/* What a bound function has: its number, the heap's memory, a function that makes an array of a value, and one for each result. */
enum { NUMBER, MEMORY, CONVERT, RESULTS };

static PyObject *ndarray, *dtypes[N_ARRAYS]; /* as prepare has set them */

/* Whether it is an array of this type and shape, which is copied then.  A single sample may leave out the axis of the batch. */
static int taken(PyObject *value, int number, char *heap)
{
    const struct array *a = &ARRAYS[number];
    NumPyArray *given = (NumPyArray *)value;
    if (value->type != ndarray || given->dtype != dtypes[number] || !(given->flags & C_CONTIGUOUS))
        return 0;
    int skipped = BATCH == 1 && given->rank == a->rank - 1, fits = given->rank + skipped == a->rank;
    for (int k = 0; fits && k < given->rank; k++)
        fits = given->shape[k] == a->shape[k + skipped];
    if (fits)
        __builtin_memcpy(heap + a->at, given->data, (unsigned long)a->bytes);
    return fits;
}

static int take(PyObject *value, int number, char *heap, PyObject *convert)
{
    const struct array *a = &ARRAYS[number];
    if (a->code == 'f' && a->bytes == 4 && (value->type == &PyLong_Type || value->type == &PyFloat_Type)) {
        double x = PyFloat_AsDouble(value);
        *(float *)(heap + a->at) = (float)x;
        return !(x == -1.0 && PyErr_Occurred());
    }
    if (taken(value, number, heap))
        return 1;
    PyObject *made = PyObject_CallFunction(convert, "iO", number, value);
    if (!made)
        return 0;
    int done = taken(made, number, heap);
    Py_DecRef(made);
    if (!done)
        PyErr_Format(PyExc_TypeError, "%s is no array", a->name);
    return done;
}

static PyObject *result(PyObject *self, const struct function *f, int k, char *heap)
{
    const struct array *a = &ARRAYS[f->gives[k]];
    if (!a->rank && a->code == 'f' && a->bytes == 4)
        return PyFloat_FromDouble(*(float *)(heap + a->at));
    return PyObject_CallObject(PyTuple_GetItem(self, RESULTS + k), 0);
}

static PyObject *call(PyObject *self, PyObject *const *given, ssize n)
{
    const struct function *f = &FUNCTIONS[PyLong_AsSsize_t(PyTuple_GetItem(self, NUMBER))];
    char *heap = PyByteArray_AsString(PyTuple_GetItem(self, MEMORY));
    heap += -(__UINTPTR_TYPE__)heap % ALIGN;
    if (n != f->n_takes)
        return PyErr_Format(PyExc_TypeError, "%s takes %d arrays: %zd are given", f->name, f->n_takes, n);
    for (int k = 0; k < n; k++)
        if (!take(given[k], f->takes[k], heap, PyTuple_GetItem(self, CONVERT)))
            return 0;
    int trap = f->run(heap);
    if (trap)
        return PyErr_Format(PyExc_ValueError, TRAPPED, f->name, trap & 255, trap >> 8);
    if (f->n_gives == 1)
        return result(self, f, 0, heap);
    PyObject *all = PyTuple_New(f->n_gives);
    for (int k = 0; all && k < f->n_gives; k++) {
        PyObject *one = result(self, f, k, heap);
        if (one)
            PyTuple_SetItem(all, k, one);
        else
            Py_DecRef(all), all = 0;
    }
    return all;
}

/* bind(function's number, memory, convert, results...) -> the function, with a heap */
static PyMethodDef METHODS[N_FUNCTIONS];

static PyObject *bind(PyObject *self, PyObject *const *given, ssize n)
{
    PyObject *of = PyTuple_New(n);
    if (!of)
        return 0;
    for (ssize k = 0; k < n; k++) {
        Py_IncRef(given[k]);
        PyTuple_SetItem(of, k, given[k]);
    }
    ssize number = PyLong_AsSsize_t(given[NUMBER]);
    METHODS[number] = (PyMethodDef){FUNCTIONS[number].name, call, METH_FASTCALL, FUNCTIONS[number].what};
    PyObject *bound = PyCFunction_NewEx(&METHODS[number], of, 0);
    Py_DecRef(of);
    return bound;
}

/* prepare(ndarray, dtype of each array) */
static PyObject *prepare(PyObject *self, PyObject *const *given, ssize n)
{
    ndarray = given[0];
    Py_IncRef(ndarray);
    for (int k = 1; k < n; k++) {
        dtypes[k - 1] = given[k];
        Py_IncRef(given[k]);
    }
    return PyTuple_New(0);
}

__attribute__((visibility("default"))) PyObject *PyInit__code(void)
{
    static PyMethodDef methods[] = {{"bind", bind, METH_FASTCALL, 0}, {"prepare", prepare, METH_FASTCALL, 0}, {0, 0, 0, 0}};
    static PyModuleDef module = {.base = {.count = 1}, .name = "_code", .size = -1, .methods = methods};
    return PyModule_Create2(&module, API);
}
