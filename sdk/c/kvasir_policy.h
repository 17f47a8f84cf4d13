/* What the Kvasir policies of every slot share, in C11 or C++17; no libc, no WASI. Include the header of
 * your slot instead: kvasir_scheduler.h, kvasir_evictor.h, kvasir_admitter.h or kvasir_balancer.h.
 * `kvasir policy build` makes the component. */
#ifndef KVASIR_POLICY_H
#define KVASIR_POLICY_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifndef KV_SLOT
#error "include the header of your slot: kvasir_scheduler.h, kvasir_evictor.h, kvasir_admitter.h or kvasir_balancer.h"
#endif
#ifdef __cplusplus
extern "C" {
#endif

#define KV_OPTIONAL __attribute__((weak))
#define KV_NONE UINT32_MAX /* no slot, no parent, never */

typedef struct { const char *name, *value, *doc; } kv_setting; /* value: the default, as text */
typedef struct { const char *name, *version; const kv_setting *settings; uint32_t count; } kv_description;
typedef struct { const char *at; uint32_t length; } kv_text; /* UTF-8, not terminated */
typedef struct { const uint32_t *at; uint32_t length; } kv_words;
typedef struct { const float *at; uint32_t length; } kv_floats;
typedef struct { const float *at; uint32_t count, width; } kv_rows; /* value c of row i: at[i * width + c] */
typedef struct { const uint8_t *at; uint32_t length; } kv_bytes;

/* What every policy defines. `kv_configure` gets each setting once: the operator's value, or the
 * default. It returns NULL, or the text of a refusal. State: see `control` in common.wit. */
extern const kv_description kv_policy;
KV_OPTIONAL const char *kv_configure(kv_text name, kv_text value);
KV_OPTIONAL kv_bytes kv_export_state(void);
KV_OPTIONAL const char *kv_import_state(kv_bytes state);

#ifdef __wasm__
#define KV_NAME(interface, function) "kvasir:policy/" interface "@0.1.0#" function
#define KV_EXPORT(name) __attribute__((export_name(name), used))
__attribute__((import_module("kvasir:policy/log@0.1.0"), import_name("log")))
void kv_log_(uint32_t level, const char *text, uint32_t length);
#define kv_memory_fail_() __builtin_trap()
/* Blocks of memory have 16 bytes in front: the size of what follows. Freed ones hang in a list for each
 * power of two up to 64 KiB; larger ones are whole pages, all in one list. */
typedef struct kv_block_ { uint32_t size; struct kv_block_ *next; uint32_t pad[2]; } kv_block_;
extern unsigned char __heap_base;
static kv_block_ *kv_free_[18];
static uintptr_t kv_top_;
static void *kv_raw_(size_t bytes) {
    uint32_t list = 17, size = (uint32_t)(bytes + 65535) & ~65535u;
    if (bytes <= 65536) for (list = 4, size = 16; size < bytes; size *= 2) list++;
    if (size < bytes) kv_memory_fail_();
    for (kv_block_ **at = &kv_free_[list]; *at; at = &(*at)->next)
        if ((*at)->size >= size && (*at)->size / 2 <= size) {
            kv_block_ *block = *at;
            *at = block->next;
            return block + 1;
        }
    if (!kv_top_) kv_top_ = ((uintptr_t)&__heap_base + 15) & ~(uintptr_t)15;
    uint64_t end = (uint64_t)kv_top_ + sizeof(kv_block_) + size, pages = (end + 65535) / 65536;
    uint64_t have = __builtin_wasm_memory_size(0);
    if (pages > 65535) kv_memory_fail_();
    if (pages > have && __builtin_wasm_memory_grow(0, (size_t)(pages - have)) == (size_t)-1) kv_memory_fail_();
    kv_block_ *block = (kv_block_ *)kv_top_;
    block->size = size;
    kv_top_ = (uintptr_t)end;
    return block + 1;
}
static inline void kv_free(void *memory) {
    if (!memory) return;
    kv_block_ *block = (kv_block_ *)memory - 1;
    uint32_t list = block->size > 65536 ? 17 : (uint32_t)(31 - __builtin_clz(block->size));
    block->next = kv_free_[list];
    kv_free_[list] = block;
}
/* The host's lists are ours to free; an empty one has no memory, but a small number for a pointer. */
static inline void kv_done_(const void *list) { if ((uintptr_t)list > 16) kv_free((void *)(uintptr_t)list); }
/* The host asks for memory before it passes a list. */
KV_EXPORT("cabi_realloc") void *kv_realloc_(void *old, size_t old_size, size_t align, size_t size) {
    if (!size) return (void *)align;
    void *memory = kv_raw_(size);
    if (old_size) __builtin_memcpy(memory, old, old_size < size ? old_size : size), kv_free(old);
    return memory;
}
#else /* natively, in your tests: calls go straight in, lists stay the caller's */
#include <stdio.h>
#include <stdlib.h>
#define KV_NAME(interface, function) ""
#define KV_EXPORT(name) __attribute__((unused)) static
#define kv_log_(level, text, length) (void)fprintf(stderr, "log %u: %.*s\n", (unsigned)(level), (int)(length), text)
#define kv_raw_(bytes) malloc(bytes)
#define kv_free(memory) free(memory)
#define kv_done_(list) ((void)(list))
#endif

/* Zeroed memory; kv_free gives it back. */
static inline void *kv_alloc(size_t bytes) { return bytes ? __builtin_memset(kv_raw_(bytes), 0, bytes) : NULL; }
/* Frees what `array` points to and gives it `count` zeroed elements: for `kv_open`, which comes again. */
#define KV_NEW(array, count) (kv_free(array), (array) = (__typeof__(array))kv_alloc((size_t)(count) * sizeof *(array)))
static inline uint32_t kv_length(const char *text) { uint32_t n = 0; while (text[n]) n++; return n; }
/* Level: 1 error, 2 warning, 3 information, 4 debug. */
static inline void kv_log(uint32_t level, const char *text) { kv_log_(level, text, kv_length(text)); }
static inline bool kv_is(kv_text a, const char *b) {
    uint32_t i = 0;
    while (i < a.length && b[i] && a.at[i] == b[i]) i++;
    return i == a.length && !b[i];
}
/* A number such as `12` or `-0.25` for `kv_configure`; false if the text is not one. */
static inline bool kv_number(kv_text text, double *value) {
    bool minus = text.length && text.at[0] == '-', digits = false, fraction = false;
    double sum = 0, unit = 1;
    for (uint32_t i = minus; i < text.length; i++) {
        if (text.at[i] == '.' && !fraction) { fraction = true; continue; }
        if (text.at[i] < '0' || text.at[i] > '9') return false;
        sum = sum * 10 + (text.at[i] - '0'), unit *= fraction ? 10 : 1, digits = true;
    }
    *value = (minus ? -sum : sum) / unit;
    return digits;
}
static inline float kv_float(uint32_t bits) { float value; __builtin_memcpy(&value, &bits, 4); return value; }
static inline uint64_t kv_u64(const uint32_t *words) { return words[0] | (uint64_t)words[1] << 32; }

/* `control`, for every slot. Records lie in memory field after field, each aligned to its own size. */
typedef struct { uint32_t failed; kv_text text; } kv_result_;
typedef struct { kv_text name, value, doc; } kv_setting_;
typedef struct { kv_text name, version, slot; const kv_setting_ *settings; uint32_t count; } kv_description_;
typedef struct { kv_text name, value; } kv_pair;
static inline kv_text kv_text_(const char *text) { kv_text t = {text, text ? kv_length(text) : 0}; return t; }
static inline kv_result_ *kv_say_(const char *error) {
    static kv_result_ answer;
    answer.failed = error != NULL, answer.text = kv_text_(error);
    return &answer;
}
static inline const char *kv_join_(char *buffer, uint32_t size, const char *start, kv_text rest) {
    uint32_t n = 0;
    while (start[n]) buffer[n] = start[n], n++;
    for (uint32_t i = 0; i < rest.length && rest.at[i] > 31 && rest.at[i] < 127 && n + 1 < size; i++) buffer[n++] = rest.at[i];
    buffer[n] = 0;
    return buffer;
}
KV_EXPORT(KV_NAME("control", "describe")) kv_description_ *kv_abi_describe(void) {
    static kv_description_ answer;
    static kv_setting_ *settings;
    KV_NEW(settings, kv_policy.count);
    for (uint32_t i = 0; i < kv_policy.count; i++) {
        const kv_setting *s = &kv_policy.settings[i];
        settings[i].name = kv_text_(s->name), settings[i].value = kv_text_(s->value), settings[i].doc = kv_text_(s->doc);
    }
    answer.name = kv_text_(kv_policy.name), answer.version = kv_text_(kv_policy.version), answer.slot = kv_text_(KV_SLOT);
    answer.settings = settings, answer.count = kv_policy.count;
    return &answer;
}
KV_EXPORT(KV_NAME("control", "configure")) kv_result_ *kv_abi_configure(kv_pair *given, uint32_t count) {
    static char unknown[96];
    const char *error = NULL;
    for (uint32_t g = 0; g < count && !error; g++) {
        bool known = false;
        for (uint32_t i = 0; i < kv_policy.count; i++) known |= kv_is(given[g].name, kv_policy.settings[i].name);
        if (!known) error = kv_join_(unknown, sizeof unknown, "unknown setting: ", given[g].name);
    }
    for (uint32_t i = 0; i < kv_policy.count && !error; i++) {
        kv_text value = kv_text_(kv_policy.settings[i].value);
        for (uint32_t g = 0; g < count; g++)
            if (kv_is(given[g].name, kv_policy.settings[i].name)) value = given[g].value;
        if (kv_configure) error = kv_configure(kv_text_(kv_policy.settings[i].name), value);
    }
    for (uint32_t g = 0; g < count; g++) kv_done_(given[g].name.at), kv_done_(given[g].value.at);
    kv_done_(given);
    return kv_say_(error);
}
KV_EXPORT(KV_NAME("control", "export-state")) kv_bytes *kv_abi_export_state(void) {
    static kv_bytes answer;
    kv_bytes none = {NULL, 0};
    answer = kv_export_state ? kv_export_state() : none;
    return &answer;
}
KV_EXPORT(KV_NAME("control", "import-state")) kv_result_ *kv_abi_import_state(uint8_t *state, uint32_t length) {
    kv_bytes list = {state, length};
    const char *error = kv_import_state ? kv_import_state(list) : "this policy keeps no state";
    kv_done_(state);
    return kv_say_(error);
}
#ifdef __cplusplus
}
#endif
#endif
