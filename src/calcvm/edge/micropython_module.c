#include <string.h>
#include "py/binary.h"
#include "py/objarray.h"
#include "py/runtime.h"
#include "py/stackctrl.h"

struct array { const char *name; uint32_t at, bytes; char code; uint8_t rank; uint32_t shape[MOST_AXES]; };
struct function { const char *name, *what; int32_t (*run)(void *); uint8_t n_takes, n_gives; uint16_t takes[MOST_ARRAYS], gives[MOST_ARRAYS]; };
static const struct array ARRAYS[] = ARRAY_ROWS;
static const struct function FUNCTIONS[] = FUNCTION_ROWS;

typedef struct { mp_obj_base_t base; byte *memory; uint32_t calls; } model;

/* Memory is what the collector knows; the heap is its first multiple of ALIGN. */
static void *aligned(byte *memory)
{
    return memory + (-(uintptr_t)memory & (ALIGN - 1));
}

static void *heap_of(mp_obj_t self)
{
    return aligned(((model *)MP_OBJ_TO_PTR(self))->memory);
}

static size_t count(const struct array *a)
{
    return a->bytes / mp_binary_get_size('@', a->code, NULL);
}

/* Write a number, or the numbers of what can be gone through, from place k on; returns the next place. */
static size_t fill(mp_obj_t value, const struct array *a, void *to, size_t k)
{
    mp_obj_iter_buf_t buffer;
    mp_obj_t item, each;
    if (mp_obj_is_float(value) || mp_obj_is_int(value) || mp_obj_is_bool(value) || mp_obj_is_str(value)) { /* a text is refused */
        if (k < count(a)) {
            mp_binary_set_val_array(a->code, to, k, value);
            if (a->code != 'f' && a->code != 'd' && !mp_obj_equal(mp_binary_get_val_array(a->code, to, k), value))
                mp_raise_msg_varg(&mp_type_ValueError, MP_ERROR_TEXT("%s has values that its type has not"), a->name);
        }
        return k + 1;
    }
    MP_STACK_CHECK();
    each = mp_getiter(value, &buffer);
    while ((item = mp_iternext(each)) != MP_OBJ_STOP_ITERATION)
        k = fill(item, a, to, k);
    return k;
}

static void take(mp_obj_t value, const struct array *a, char *heap)
{
    mp_buffer_info_t given;
    size_t n;
    if (!mp_obj_is_str(value) && mp_get_buffer(value, &given, MP_BUFFER_READ) && given.typecode == a->code) {
        n = given.len / mp_binary_get_size('@', a->code, NULL);
        if (given.len == a->bytes)
            memmove(heap + a->at, given.buf, given.len);
    } else
        n = fill(value, a, heap + a->at, 0);
    if (n != count(a))
        mp_raise_msg_varg(&mp_type_ValueError, MP_ERROR_TEXT("%s has %d numbers: %d are wanted"), a->name, (int)n, (int)count(a));
}

static mp_obj_t result(const struct array *a, char *heap)
{
    if (!a->rank)
        return mp_binary_get_val_array(a->code, heap + a->at, 0);
    mp_obj_array_t *made = mp_obj_malloc(mp_obj_array_t, &mp_type_array);
    made->typecode = (byte)a->code;
    made->free = 0;
    made->len = count(a);
    made->items = m_new(byte, a->bytes);
    memcpy(made->items, heap + a->at, a->bytes);
    return MP_OBJ_FROM_PTR(made);
}

static mp_obj_t run(int number, const mp_obj_t *given)
{
    const struct function *f = &FUNCTIONS[number];
    model *self = MP_OBJ_TO_PTR(given[0]);
    char *heap = heap_of(given[0]);
    uint32_t calls = ++self->calls;
    mp_obj_t all[MOST_ARRAYS] = {mp_const_none};
    for (int k = 0; k < f->n_takes; k++)
        take(given[1 + k], &ARRAYS[f->takes[k]], heap);
    if (self->calls != calls)
        mp_raise_msg_varg(&mp_type_RuntimeError, MP_ERROR_TEXT("an argument of %s calls the model while it is read: make a list of it"), f->name);
    int trap = (int)f->run(heap);
    if (trap)
        mp_raise_msg_varg(&mp_type_ValueError, MP_ERROR_TEXT(TRAPPED), f->name, trap & 255, trap >> 8);
    for (int k = 0; k < f->n_gives; k++)
        all[k] = result(&ARRAYS[f->gives[k]], heap);
    return f->n_gives < 2 ? all[0] : mp_obj_new_tuple(f->n_gives, all);
}

/* array(name): a view of an array in the heap, which is read and written in place. */
static mp_obj_t array(mp_obj_t self, mp_obj_t name)
{
    const char *wanted = mp_obj_str_get_str(name);
    byte *memory = ((model *)MP_OBJ_TO_PTR(self))->memory; /* the view keeps it */
    for (int k = 0; k < N_ARRAYS; k++)
        if (!strcmp(ARRAYS[k].name, wanted)) {
            const struct array *a = &ARRAYS[k];
            size_t offset = (size_t)((byte *)aligned(memory) - memory) + a->at, size = mp_binary_get_size('@', a->code, NULL);
            mp_obj_array_t *view = m_new_obj(mp_obj_array_t);
            mp_obj_memoryview_init(view, (byte)a->code | MP_OBJ_ARRAY_TYPECODE_FLAG_RW, offset / size, count(a), memory);
            return MP_OBJ_FROM_PTR(view);
        }
    mp_raise_msg_varg(&mp_type_KeyError, MP_ERROR_TEXT("there is no array '%s'"), wanted);
}
static MP_DEFINE_CONST_FUN_OBJ_2(array_obj, array);

static void set_state(void *heap, mp_obj_t state)
{
    mp_buffer_info_t given;
    mp_get_buffer_raise(state, &given, MP_BUFFER_READ);
    if (given.len != STATE_BYTES)
        mp_raise_msg_varg(&mp_type_ValueError, MP_ERROR_TEXT("a state has %d bytes, not %d"), STATE_BYTES, (int)given.len);
    memcpy((char *)heap + STATE_OFFSET, given.buf, given.len);
}

static mp_obj_t make_model(const mp_obj_type_t *type, size_t n, size_t named, const mp_obj_t *given)
{
    mp_arg_check_num(n, named, 0, 1, false);
    model *self = mp_obj_malloc(model, type);
    self->calls = 0;
    self->memory = m_new0(byte, HEAP_BYTES + ALIGN);
    START(aligned(self->memory));
    if (n)
        set_state(aligned(self->memory), given[0]);
    return MP_OBJ_FROM_PTR(self);
}

/* state: bytes that last, read and set. */
static void attribute(mp_obj_t self, qstr name, mp_obj_t *out)
{
    if (name != MP_QSTR_state || (out[0] != MP_OBJ_NULL && out[1] == MP_OBJ_NULL))
        out[1] = out[0] == MP_OBJ_NULL ? MP_OBJ_SENTINEL : out[1]; /* a method; what is neither is refused */
    else if (out[0] == MP_OBJ_NULL)
        out[0] = mp_obj_new_bytes((const byte *)heap_of(self) + STATE_OFFSET, STATE_BYTES);
    else {
        set_state(heap_of(self), out[1]);
        out[0] = MP_OBJ_NULL;
    }
}

#ifdef SAVE
/* page(counter): the state as a page, with which a cut of power loses nothing. */
static mp_obj_t page(mp_obj_t self, mp_obj_t counter)
{
    vstr_t made;
    vstr_init_len(&made, PAGE_BYTES);
    SAVE(heap_of(self), (uint32_t)mp_obj_get_int_truncated(counter), made.buf);
    return mp_obj_new_bytes_from_vstr(&made);
}
static MP_DEFINE_CONST_FUN_OBJ_2(page_obj, page);

/* load(a, b): sets the state to that of the newer whole one of two pages; returns its counter, or None. */
static mp_obj_t load(mp_obj_t self, mp_obj_t a, mp_obj_t b)
{
    mp_buffer_info_t of_a, of_b;
    uint32_t counter;
    mp_get_buffer_raise(a, &of_a, MP_BUFFER_READ);
    mp_get_buffer_raise(b, &of_b, MP_BUFFER_READ);
    if (of_a.len < PAGE_BYTES)
        of_a = of_b;
    if (of_b.len < PAGE_BYTES)
        of_b = of_a;
    if (of_a.len < PAGE_BYTES || !LOAD(heap_of(self), of_a.buf, of_b.buf, &counter))
        return mp_const_none;
    return mp_obj_new_int_from_uint(counter);
}
static MP_DEFINE_CONST_FUN_OBJ_3(load_obj, load);
#endif

#ifdef SELF_TEST
/* self_test(): the name of the first function that does not compute here what the PC has computed, or None; the model stays as it is. */
static mp_obj_t self_test(mp_obj_t self)
{
    byte *memory = m_new(byte, HEAP_BYTES + ALIGN);
    int failed = SELF_TEST(aligned(memory));
    (void)self;
    m_del(byte, memory, HEAP_BYTES + ALIGN);
    return failed ? mp_obj_new_str(FUNCTIONS[failed].name, strlen(FUNCTIONS[failed].name)) : mp_const_none;
}
static MP_DEFINE_CONST_FUN_OBJ_1(self_test_obj, self_test);
#endif
