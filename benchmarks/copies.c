/* Counts what the C library copies for its caller, memcpy and memmove: `quicoll_copied` in pieces of packets and slices, and
 * `quicoll_moved` in larger ones, which are whole buffers that grow. See copies.py.
 * What the C library copies for itself (reading a socket, realloc) does not pass here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

enum { LEAST = 4096, SLICE = 65536 };

unsigned long long quicoll_copied, quicoll_moved;

typedef void *copy(void *, const void *, size_t);

static void *through(copy **next, const char *name, void *to, const void *from, size_t size) {
    if (!*next) *(void **)next = dlsym(RTLD_NEXT, name);
    if (size > SLICE) quicoll_moved += size;
    else if (size >= LEAST) quicoll_copied += size;
    return (*next)(to, from, size);
}

void *memcpy(void *to, const void *from, size_t size) {
    static copy *next;
    return through(&next, "memcpy", to, from, size);
}

void *memmove(void *to, const void *from, size_t size) {
    static copy *next;
    return through(&next, "memmove", to, from, size);
}

void *__memcpy_chk(void *to, const void *from, size_t size, size_t room) {
    (void)room;
    return memcpy(to, from, size);
}

void *__memmove_chk(void *to, const void *from, size_t size, size_t room) {
    (void)room;
    return memmove(to, from, size);
}
