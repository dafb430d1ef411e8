// The fast call into a finished binary, as a Python extension that needs nothing but Python.h.
//
// make(address, kinds, fail) returns a callable (device, stream, *slots). It packs the slots into 64-bit words by `kinds`
// ('p' pointer, 'i' int64, 'd' double), calls `int launch(const void* params, int device, void* stream)` at `address`
// and returns None when the result is 0. Otherwise it calls fail(code, args), which raises; code -1 means that the
// arguments do not fit `kinds`. The GIL is kept: a launch only queues work.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#define MAX_SLOTS 64

typedef int (*launch_function)(const void*, int, void*);

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  launch_function launch;
  PyObject* fail;
  Py_ssize_t num_slots;
  char kinds[MAX_SLOTS];
} Launcher;

// 1 when `object` is an integer that fits; a Python error may be left set otherwise and is replaced by the caller.
static int as_word(PyObject* object, int is_pointer, uint64_t* word) {
  if (is_pointer && object == Py_None) {
    *word = 0;
    return 1;
  }
  PyObject* index = PyLong_Check(object) ? Py_NewRef(object) : PyNumber_Index(object);
  if (!index) return 0;
  int overflow = 0;
  long long value = PyLong_AsLongLongAndOverflow(index, &overflow);
  *word = (uint64_t)value;
  if (overflow > 0 && is_pointer) {  // an address in the upper half
    *word = PyLong_AsUnsignedLongLong(index);
    overflow = 0;
  }
  Py_DECREF(index);
  return overflow == 0 && !PyErr_Occurred();
}

static int as_double(PyObject* object, uint64_t* word) {
  double value = PyFloat_CheckExact(object) ? PyFloat_AS_DOUBLE(object) : PyFloat_AsDouble(object);
  memcpy(word, &value, sizeof value);
  return value != -1.0 || !PyErr_Occurred();
}

static PyObject* fail(Launcher* self, int code, PyObject* const* args, Py_ssize_t count) {
  PyErr_Clear();
  PyObject* tuple = PyTuple_New(count);
  if (!tuple) return NULL;
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
  PyObject* result = PyObject_CallFunction(self->fail, "iO", code, tuple);
  Py_DECREF(tuple);
  if (result) {
    Py_DECREF(result);
    PyErr_Format(PyExc_RuntimeError, "kernel launch failed with code %d", code);
  }
  return NULL;
}

static PyObject* launcher_call(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* names) {
  Launcher* self = (Launcher*)object;
  const Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  if (names && PyTuple_GET_SIZE(names))
    return PyErr_Format(PyExc_TypeError, "a launch takes no keyword arguments");
  if (count != self->num_slots + 2) return fail(self, -1, args, count);
  uint64_t device, stream, slots[MAX_SLOTS];
  int fits = as_word(args[0], 0, &device) && as_word(args[1], 1, &stream);
  for (Py_ssize_t i = 0; fits && i < self->num_slots; ++i) {
    const char kind = self->kinds[i];
    fits = kind == 'd' ? as_double(args[i + 2], &slots[i]) : as_word(args[i + 2], kind == 'p', &slots[i]);
  }
  if (!fits) return fail(self, -1, args, count);
  const int code = self->launch(slots, (int)device, (void*)(uintptr_t)stream);
  if (code) return fail(self, code, args, count);
  Py_RETURN_NONE;
}

static int launcher_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((Launcher*)object)->fail);
  return 0;
}

static int launcher_clear(PyObject* object) {
  Py_CLEAR(((Launcher*)object)->fail);
  return 0;
}

static void launcher_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  launcher_clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

static PyMemberDef launcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Launcher, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot launcher_slots[] = {
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_dealloc, launcher_dealloc},
    {Py_tp_traverse, launcher_traverse},
    {Py_tp_clear, launcher_clear},
    {Py_tp_members, launcher_members},
    {Py_tp_doc, "Launches one kernel: (device, stream, *slots) -> None."},
    {0, NULL},
};

static PyType_Spec launcher_spec = {
    .name = "hpcjit_binder.Launcher",
    .basicsize = sizeof(Launcher),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = launcher_slots,
};

static PyTypeObject* launcher_type;

static PyObject* make(PyObject* module, PyObject* args) {
  (void)module;
  unsigned long long address;
  const char* kinds;
  PyObject* handler;
  if (!PyArg_ParseTuple(args, "KsO", &address, &kinds, &handler)) return NULL;
  const size_t count = strlen(kinds);
  if (!address || count > MAX_SLOTS || strspn(kinds, "pid") != count || !PyCallable_Check(handler)) {
    return PyErr_Format(PyExc_ValueError, "make needs an address, at most %d kinds of p, i, d and a callable",
                        MAX_SLOTS);
  }
  Launcher* self = PyObject_GC_New(Launcher, launcher_type);
  if (!self) return NULL;
  self->vectorcall = launcher_call;
  self->launch = (launch_function)(uintptr_t)address;
  self->fail = Py_NewRef(handler);
  self->num_slots = (Py_ssize_t)count;
  memcpy(self->kinds, kinds, count);
  PyObject_GC_Track(self);
  return (PyObject*)self;
}

#include "caller.h"

static PyMethodDef methods[] = {
    {"make", make, METH_VARARGS, "make(address, kinds, fail) -> callable(device, stream, *slots)"},
    {"caller", make_caller, METH_VARARGS,
     "caller(kinds, exchange, Tensor, Parameter, grad_enabled, miss) -> callable(*args)"},
    {"bound", make_bound, METH_VARARGS,
     "bound(address, device, owner, fail, slots[, memory]) -> what a caller can launch"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "hpcjit_binder", .m_doc = "Fast kernel launches.",
    .m_size = -1,          .m_methods = methods,
};

PyMODINIT_FUNC PyInit_hpcjit_binder(void) {
  launcher_type = (PyTypeObject*)PyType_FromSpec(&launcher_spec);
  return launcher_type && add_caller_types() ? PyModule_Create(&definition) : NULL;
}
