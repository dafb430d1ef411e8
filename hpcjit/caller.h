// The eager path of an operator: from its Python arguments to the launch, without running Python code.
//
// caller(kinds, exchange, tensor_types, grad_enabled, miss) is a callable (*args). It forms the call's signature (see
// Signature), looks it up, and runs what is remembered for it: a Bound, whose launch it makes itself, or any callable.
// A signature not seen before, or a call that has none, goes to miss(key or None, args).
//
// A launch that needs memory finds that of its stream in a dict, unless the stream is being captured or has too little: then
// `provide` of hpcjit/workspace.py is asked. The GIL is held from there to the launch, so no other thread can come between
// and have the memory replaced and reused first.
//
// Tensors are read through the DLPack exchange functions that torch.Tensor publishes (`__dlpack_c_exchange_api__`, DLPack
// 1.2 and later): address, shape, strides and dtype in one C call of some 20 ns. Included by binder.c.
#pragma once

// The stable ABI of DLPack, as far as it is used here.
typedef struct {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DlTensor;

typedef struct Exchange {
  uint32_t major, minor;
  struct Exchange* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DlTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
} Exchange;

enum { DL_CUDA = 2, MAX_ARGS = 24, MAX_NDIM = 8, MAX_WORDS = MAX_ARGS * (2 + 2 * MAX_NDIM) };

// Where a slot of a Bound comes from: a constant, the address of argument `index`, its value as a double, or the stream's
// memory of kind `index`.
enum { FROM_CONSTANT = 0, FROM_ADDRESS = 1, FROM_FLOAT = 2, FROM_MEMORY = 3 };
enum { SCRATCH = 0, COUNTERS = 1, MEMORY_KINDS = 2 };

// cuStreamGetCaptureInfo_v2: status 0 outside of a capture; the last four may be NULL.
typedef int (*capture_function)(void* stream, int* status, uint64_t* id, void* graph, void* nodes,
                                void* count);

typedef struct {
  PyObject_HEAD
  launch_function launch;
  PyObject* owner;  // keeps the binary open
  PyObject* fail;
  int device;
  // What launches on a stream share, as a dict: stream -> (address, bytes, ...) of each kind; NULL: none is needed.
  PyObject* streams;
  PyObject* provide;         // (stream) -> such a tuple with enough of each
  capture_function capture;  // NULL: always ask `provide`
  uint64_t need[MEMORY_KINDS];
  Py_ssize_t num_slots;
  struct {
    int from;
    int index;
    uint64_t word;
  } slots[MAX_SLOTS];
} Bound;

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  const Exchange* exchange;
  PyObject* tensor_type;
  PyObject* parameter_type;
  PyObject* grad_enabled;
  PyObject* miss;
  PyObject* remembered;  // dict: signature bytes -> Bound or callable
  Py_ssize_t num_args;
  char kinds[MAX_ARGS];  // 't' tensor or None, 'f' float, 'k' int, bool, None or short string
} Caller;

// Words that tell one signature from another, and what a launch needs from the arguments.
typedef struct {
  uint64_t words[MAX_WORDS];
  Py_ssize_t count;
  uint64_t address[MAX_ARGS];
  uint64_t number[MAX_ARGS];  // doubles, bit for bit
} Signature;

static PyTypeObject *bound_type, *caller_type;
static PyObject* requires_grad_name;

static int add_tensor(const Caller* self, PyObject* object, int i, Signature* s) {
  DlTensor t;
  if (object == Py_None) {
    s->words[s->count++] = UINT64_MAX;
    s->address[i] = 0;
    return 1;
  }
  PyObject* type = (PyObject*)Py_TYPE(object);
  if (type != self->tensor_type && type != self->parameter_type)
    return 0;  // subclasses may mean something else
  if (self->exchange->tensor_from_object(object, &t)) {
    PyErr_Clear();  // a nested or sparse tensor: the slow path says what is wrong with it
    return 0;
  }
  if (t.ndim > MAX_NDIM) return 0;
  s->address[i] = (uint64_t)(uintptr_t)t.data + t.byte_offset;
  uint64_t same =
      0;  // 1 + the first earlier argument at this address: a call on one tensor twice is another call
  for (int k = 0; k < i && !same && s->address[i]; ++k) {
    if (self->kinds[k] == 't' && s->address[k] == s->address[i]) same = (uint64_t)k + 1;
  }
  // ndim takes four bits of its byte, the address within 16 bytes the others.
  s->words[s->count++] = t.code | (uint64_t)t.bits << 8 | (uint64_t)(uint8_t)t.lanes << 16 | same << 24 |
                         (uint64_t)t.ndim << 32 | (s->address[i] & 15) << 36 |
                         (uint64_t)(uint8_t)t.device_type << 40 | (uint64_t)(uint16_t)t.device_id << 48;
  for (int d = 0; d < t.ndim; ++d) {
    s->words[s->count++] = (uint64_t)t.shape[d];
    s->words[s->count++] = (uint64_t)t.strides[d];
  }
  return 1;
}

static int add_key(PyObject* object, Signature* s) {
  if (object == Py_None || PyBool_Check(object)) {
    s->words[s->count++] = object == Py_None ? 1 : object == Py_True ? 2 : 3;
    return 1;
  }
  if (PyLong_CheckExact(object)) {
    int overflow = 0;
    s->words[s->count++] = 4;
    s->words[s->count++] = (uint64_t)PyLong_AsLongLongAndOverflow(object, &overflow);
    return !overflow;
  }
  Py_ssize_t length = 0;
  const char* text = PyUnicode_CheckExact(object) ? PyUnicode_AsUTF8AndSize(object, &length) : NULL;
  if (!text || length > 16) return 0;
  s->words[s->count++] = 5 + ((uint64_t)length << 8);
  s->words[s->count] = s->words[s->count + 1] = 0;
  memcpy(&s->words[s->count], text, (size_t)length);
  s->count += 2;
  return 1;
}

static int add_float(PyObject* object, int i, Signature* s) {
  if (!PyFloat_CheckExact(object)) return 0;  // an int is as good, but rare: the slow path takes it
  const double value = PyFloat_AS_DOUBLE(object);
  memcpy(&s->number[i], &value, sizeof value);
  s->words[s->count++] = s->number[i];
  return 1;
}

// 1 if autograd follows one of the tensors; the slow path then says so.
static int follows_grad(const Caller* self, PyObject* const* args) {
  PyObject* enabled = PyObject_CallNoArgs(self->grad_enabled);
  if (!enabled) return 1;
  Py_DECREF(enabled);
  if (enabled != Py_True) return 0;
  for (Py_ssize_t i = 0; i < self->num_args; ++i) {
    if (self->kinds[i] != 't' || args[i] == Py_None) continue;
    PyObject* flag = PyObject_GetAttr(args[i], requires_grad_name);
    if (!flag) return 1;
    Py_DECREF(flag);
    if (flag != Py_False) return 1;
  }
  return 0;
}

static int sign(const Caller* self, PyObject* const* args, Signature* s) {
  s->count = 0;
  for (Py_ssize_t i = 0; i < self->num_args; ++i) {
    const int fits = self->kinds[i] == 't'   ? add_tensor(self, args[i], (int)i, s)
                     : self->kinds[i] == 'f' ? add_float(args[i], (int)i, s)
                                             : add_key(args[i], s);
    if (!fits) return 0;
  }
  return !follows_grad(self, args);
}

static int fits(const Bound* bound, PyObject* memory, uint64_t* address) {
  if (!PyTuple_CheckExact(memory) || PyTuple_GET_SIZE(memory) < 2 * MEMORY_KINDS) return 0;
  for (int i = 0; i < MEMORY_KINDS; ++i) {
    address[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(memory, 2 * i));
    if (PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(memory, 2 * i + 1)) < bound->need[i]) return 0;
  }
  return 1;
}

// The memory of a launch on `stream`, as a new reference that has to be held until then.
static PyObject* find_memory(const Bound* bound, void* stream, uint64_t* address) {
  PyObject* key = PyLong_FromVoidPtr(stream);
  if (!key) return NULL;
  int status = 0;
  uint64_t id = 0;
  const int eager = bound->capture && !bound->capture(stream, &status, &id, NULL, NULL, NULL) && !status;
  PyObject* found = eager ? PyDict_GetItemWithError(bound->streams, key) : NULL;
  Py_XINCREF(found);
  if (!found || !fits(bound, found, address)) {
    Py_XDECREF(found);
    found = PyErr_Occurred() ? NULL : PyObject_CallOneArg(bound->provide, key);
    if (found && !fits(bound, found, address)) {
      Py_CLEAR(found);
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "too little memory was provided");
    }
  }
  Py_DECREF(key);
  return found;
}

static PyObject* run_bound(const Caller* self, const Bound* bound, const Signature* s) {
  uint64_t slots[MAX_SLOTS], memory[MEMORY_KINDS] = {0, 0};
  void* stream = NULL;
  if (self->exchange->current_stream(DL_CUDA, bound->device, &stream)) return NULL;
  PyObject* held = bound->streams ? find_memory(bound, stream, memory) : NULL;
  if (bound->streams && !held) return NULL;
  for (Py_ssize_t i = 0; i < bound->num_slots; ++i) {
    const int index = bound->slots[i].index;
    slots[i] = bound->slots[i].from == FROM_CONSTANT  ? bound->slots[i].word
               : bound->slots[i].from == FROM_ADDRESS ? s->address[index]
               : bound->slots[i].from == FROM_FLOAT   ? s->number[index]
                                                      : memory[index];
  }
  const int code = bound->launch(slots, bound->device, stream);
  Py_XDECREF(held);
  if (code) return PyObject_CallFunction(bound->fail, "i()", code);
  Py_RETURN_NONE;
}

static PyObject* miss(const Caller* self, PyObject* key, PyObject* const* args, Py_ssize_t count) {
  PyErr_Clear();
  PyObject* tuple = PyTuple_New(count);
  if (!tuple) return NULL;
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
  PyObject* result = PyObject_CallFunctionObjArgs(self->miss, key ? key : Py_None, tuple, NULL);
  Py_DECREF(tuple);
  return result;
}

static PyObject* caller_call(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* names) {
  Caller* self = (Caller*)object;
  const Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  if ((names && PyTuple_GET_SIZE(names)) || count != self->num_args) {
    return PyErr_Format(PyExc_TypeError, "expected %zd positional arguments, got %zd", self->num_args, count);
  }
  Signature s;
  if (!sign(self, args, &s)) return miss(self, NULL, args, count);
  PyObject* key = PyBytes_FromStringAndSize((const char*)s.words, s.count * (Py_ssize_t)sizeof s.words[0]);
  if (!key) return NULL;
  PyObject* found = PyDict_GetItemWithError(self->remembered, key);
  PyObject* result;
  Py_XINCREF(found);  // the call below may forget it
  if (!found) {
    result = PyErr_Occurred() ? NULL : miss(self, key, args, count);
  } else if (Py_TYPE(found) == bound_type) {
    result = run_bound(self, (Bound*)found, &s);
  } else {
    result = PyObject_Vectorcall(found, args, (size_t)count, NULL);
  }
  Py_XDECREF(found);
  Py_DECREF(key);
  return result;
}

static int caller_traverse(PyObject* object, visitproc visit, void* arg) {
  Caller* self = (Caller*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->tensor_type);
  Py_VISIT(self->parameter_type);
  Py_VISIT(self->grad_enabled);
  Py_VISIT(self->miss);
  Py_VISIT(self->remembered);
  return 0;
}

static int caller_clear(PyObject* object) {
  Caller* self = (Caller*)object;
  Py_CLEAR(self->tensor_type);
  Py_CLEAR(self->parameter_type);
  Py_CLEAR(self->grad_enabled);
  Py_CLEAR(self->miss);
  Py_CLEAR(self->remembered);
  return 0;
}

static void caller_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  caller_clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

static int bound_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((Bound*)object)->owner);
  Py_VISIT(((Bound*)object)->fail);
  Py_VISIT(((Bound*)object)->streams);
  Py_VISIT(((Bound*)object)->provide);
  return 0;
}

static int bound_clear(PyObject* object) {
  Py_CLEAR(((Bound*)object)->owner);
  Py_CLEAR(((Bound*)object)->fail);
  Py_CLEAR(((Bound*)object)->streams);
  Py_CLEAR(((Bound*)object)->provide);
  return 0;
}

static void bound_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  bound_clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

static PyMemberDef caller_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Caller, vectorcall), READONLY, NULL},
    {"remembered", T_OBJECT, offsetof(Caller, remembered), READONLY,
     "dict of signature -> Bound or callable"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot caller_slots[] = {
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_dealloc, caller_dealloc},
    {Py_tp_traverse, caller_traverse},
    {Py_tp_clear, caller_clear},
    {Py_tp_members, caller_members},
    {Py_tp_doc, "An operator's eager path."},
    {0, NULL},
};

static PyType_Slot bound_slots[] = {
    {Py_tp_dealloc, bound_dealloc},
    {Py_tp_traverse, bound_traverse},
    {Py_tp_clear, bound_clear},
    {Py_tp_doc, "A launch whose slots are constants and arguments of the call."},
    {0, NULL},
};

static PyType_Spec caller_spec = {
    .name = "hpcjit_binder.Caller",
    .basicsize = sizeof(Caller),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = caller_slots,
};

static PyType_Spec bound_spec = {
    .name = "hpcjit_binder.Bound",
    .basicsize = sizeof(Bound),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = bound_slots,
};

static PyObject* make_caller(PyObject* module, PyObject* args) {
  (void)module;
  const char* kinds;
  PyObject *capsule, *tensor_type, *parameter_type, *grad_enabled, *handler;
  if (!PyArg_ParseTuple(args, "sOOOOO", &kinds, &capsule, &tensor_type, &parameter_type, &grad_enabled,
                        &handler))
    return NULL;
  const Exchange* exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  while (exchange && exchange->major > 1) exchange = exchange->previous;
  const size_t count = strlen(kinds);
  if (!exchange || !exchange->tensor_from_object || count > MAX_ARGS || strspn(kinds, "tfk") != count) {
    return PyErr_Occurred()
               ? NULL
               : PyErr_Format(PyExc_ValueError, "no usable DLPack exchange, or bad kinds '%s'", kinds);
  }
  PyObject* remembered = PyDict_New();
  Caller* self = remembered ? PyObject_GC_New(Caller, caller_type) : NULL;
  if (!self) {
    Py_XDECREF(remembered);
    return NULL;
  }
  self->vectorcall = caller_call;
  self->exchange = exchange;
  self->tensor_type = Py_NewRef(tensor_type);
  self->parameter_type = Py_NewRef(parameter_type);
  self->grad_enabled = Py_NewRef(grad_enabled);
  self->miss = Py_NewRef(handler);
  self->remembered = remembered;
  self->num_args = (Py_ssize_t)count;
  memcpy(self->kinds, kinds, count);
  PyObject_GC_Track(self);
  return (PyObject*)self;
}

static PyObject* make_bound(PyObject* module, PyObject* args) {
  (void)module;
  unsigned long long address;
  int device;
  PyObject *owner, *handler, *slots, *streams = NULL, *provide = NULL;
  unsigned long long capture = 0, scratch = 0, counters = 0;
  if (!PyArg_ParseTuple(args, "KiOOO!|(O!OKKK)", &address, &device, &owner, &handler, &PyTuple_Type, &slots,
                        &PyDict_Type, &streams, &provide, &capture, &scratch, &counters))
    return NULL;
  const Py_ssize_t count = PyTuple_GET_SIZE(slots);
  if (!address || count > MAX_SLOTS)
    return PyErr_Format(PyExc_ValueError, "no address, or more than %d slots", MAX_SLOTS);
  Bound* self = PyObject_GC_New(Bound, bound_type);
  if (!self) return NULL;
  self->launch = (launch_function)(uintptr_t)address;
  self->owner = Py_NewRef(owner);
  self->fail = Py_NewRef(handler);
  self->device = device;
  self->streams = Py_XNewRef(streams);
  self->provide = Py_XNewRef(provide);
  self->capture = (capture_function)(uintptr_t)capture;
  self->need[SCRATCH] = scratch;
  self->need[COUNTERS] = counters;
  self->num_slots = count;
  PyObject_GC_Track(self);
  for (Py_ssize_t i = 0; i < count; ++i) {  // (from, argument index, constant as an unsigned 64-bit word)
    unsigned long long word;
    int from, index;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(slots, i), "iiK", &from, &index, &word)) {
      Py_DECREF(self);
      return NULL;
    }
    const int limit = from != FROM_MEMORY ? MAX_ARGS : streams ? MEMORY_KINDS : 0;
    if (from < FROM_CONSTANT || from > FROM_MEMORY || index < 0 || index >= limit) {
      Py_DECREF(self);
      return PyErr_Format(PyExc_ValueError, "slot %zd: source %d of argument %d", i, from, index);
    }
    self->slots[i].from = from;
    self->slots[i].index = index;
    self->slots[i].word = word;
  }
  return (PyObject*)self;
}

static int add_caller_types(void) {
  requires_grad_name = PyUnicode_InternFromString("requires_grad");
  caller_type = (PyTypeObject*)PyType_FromSpec(&caller_spec);
  bound_type = (PyTypeObject*)PyType_FromSpec(&bound_spec);
  return requires_grad_name && caller_type && bound_type;
}
