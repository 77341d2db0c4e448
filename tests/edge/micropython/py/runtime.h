/* What the modules of packs use of MicroPython, declared alone: they compile against it where MicroPython's sources are not. */
#ifndef RUNTIME_H
#define RUNTIME_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t byte;
typedef size_t qstr;
typedef void *mp_obj_t;
typedef struct mp_obj_type {
    size_t flags;
    mp_obj_t (*make)(const struct mp_obj_type *, size_t, size_t, const mp_obj_t *);
    void (*attr)(mp_obj_t, qstr, mp_obj_t *);
    const void *dict;
} mp_obj_type_t;
typedef struct { const mp_obj_type_t *type; } mp_obj_base_t;
typedef struct { mp_obj_t *buf[4]; } mp_obj_iter_buf_t;
typedef struct { void *buf; size_t len; int typecode; } mp_buffer_info_t;
typedef struct { size_t alloc, len; char *buf; } vstr_t;
typedef struct { size_t key; const void *value; } mp_rom_map_elem_t;
typedef struct { size_t n; const mp_rom_map_elem_t *table; } mp_obj_dict_t;
typedef struct { mp_obj_base_t base; mp_obj_dict_t *globals; } mp_obj_module_t;
typedef struct {
    size_t least, most;
    mp_obj_t (*of_1)(mp_obj_t), (*of_2)(mp_obj_t, mp_obj_t), (*of_3)(mp_obj_t, mp_obj_t, mp_obj_t), (*of_many)(size_t, const mp_obj_t *);
} function;

enum { MP_QSTR_state = 1, MP_BUFFER_READ = 1, MP_TYPE_FLAG_NONE = 0 };
extern const mp_obj_type_t mp_type_array, mp_type_module, mp_type_ValueError, mp_type_KeyError, mp_type_RuntimeError;
extern const mp_obj_t mp_const_none;
#define MP_OBJ_NULL ((mp_obj_t)0)
#define MP_OBJ_SENTINEL ((mp_obj_t)8)
#define MP_OBJ_STOP_ITERATION ((mp_obj_t)0)
#define MP_OBJ_TO_PTR(o) ((void *)(o))
#define MP_OBJ_FROM_PTR(p) ((mp_obj_t)(p))
#define MP_ERROR_TEXT(text) text
#define MP_ROM_QSTR(name) 0
#define MP_ROM_PTR(p) p
#define MP_DEFINE_CONST_FUN_OBJ_1(name, f) const function name = {1, 1, .of_1 = f}
#define MP_DEFINE_CONST_FUN_OBJ_2(name, f) const function name = {2, 2, .of_2 = f}
#define MP_DEFINE_CONST_FUN_OBJ_3(name, f) const function name = {3, 3, .of_3 = f}
#define MP_DEFINE_CONST_FUN_OBJ_VAR_BETWEEN(name, a, b, f) const function name = {a, b, .of_many = f}
#define MP_DEFINE_CONST_DICT(name, rows) const mp_obj_dict_t name = {sizeof(rows) / sizeof(rows[0]), rows}
#define MP_DEFINE_CONST_OBJ_TYPE(name, of, flags, a, make_, b, attr_, c, dict_) \
    const mp_obj_type_t name = {flags, make_, attr_, dict_}
#define MP_REGISTER_MODULE(name, module) extern const mp_obj_module_t module
#define mp_obj_malloc(of, type) ((of *)malloced(sizeof(of), type))
#define m_new_obj(of) ((of *)m_malloc(sizeof(of)))
#define m_new(of, n) ((of *)m_malloc(sizeof(of) * (n)))
#define m_new0(of, n) ((of *)m_malloc(sizeof(of) * (n)))
#define m_del(of, p, n) m_free(p, sizeof(of) * (n))

void *malloced(size_t, const mp_obj_type_t *), *m_malloc(size_t), m_free(void *, size_t), vstr_init_len(vstr_t *, size_t);
bool mp_obj_is_float(mp_obj_t), mp_obj_is_int(mp_obj_t), mp_obj_is_bool(mp_obj_t), mp_obj_is_str(mp_obj_t);
bool mp_obj_equal(mp_obj_t, mp_obj_t), mp_get_buffer(mp_obj_t, mp_buffer_info_t *, int);
void mp_get_buffer_raise(mp_obj_t, mp_buffer_info_t *, int), mp_arg_check_num(size_t, size_t, size_t, size_t, bool);
intptr_t mp_obj_get_int_truncated(mp_obj_t);
const char *mp_obj_str_get_str(mp_obj_t);
mp_obj_t mp_getiter(mp_obj_t, mp_obj_iter_buf_t *), mp_iternext(mp_obj_t), mp_obj_new_tuple(size_t, const mp_obj_t *);
mp_obj_t mp_obj_new_bytes(const byte *, size_t), mp_obj_new_bytes_from_vstr(vstr_t *), mp_obj_new_str(const char *, size_t);
mp_obj_t mp_obj_new_int_from_uint(uintptr_t);
void mp_raise_msg_varg(const mp_obj_type_t *, const char *, ...) __attribute__((noreturn, format(printf, 2, 3)));
#endif
