/* System calls without a C library, whose start would take longer than everything else that this program does. A call returns the
 * kernel's result: negative numbers are errors. There is no hidden shared state (errno, locks, an allocator), so two processes may
 * run this code in one memory. */
#ifndef ATOLL_NATIVE_SYSTEM_H
#define ATOLL_NATIVE_SYSTEM_H

#include <asm/unistd.h>
#include <linux/errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef ATOLL_REHEARSAL /* the tests simulate the kernel: see ../../testing/rehearsal.c */
long system_call(long number, long a, long b, long c, long d, long e, long f);
void rehearse_memory(char *memory, size_t used, size_t size);
#else
static inline void rehearse_memory(char *memory, size_t used, size_t size)
{
    (void)memory, (void)used, (void)size;
}

static inline long system_call(long number, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#else
#error "this architecture needs its system call convention here"
#endif
}
#endif

#define CALL_(number, a, b, c, d, e, f, ...) \
    system_call(number, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))
#define CALL(name, ...) CALL_(__NR_##name, ##__VA_ARGS__, 0, 0, 0, 0, 0, 0)

/* Call clone3. The child continues in ENTRY, on the stack given in ARGUMENTS. */
long start_process(void *arguments, size_t size, void (*entry)(void));

/* Functions to which the compiler may generate calls. */
void *memcpy(void *restrict to, const void *restrict from, size_t length);
void *memset(void *to, int byte, size_t length);
size_t strlen(const char *text);
int strcmp(const char *a, const char *b);

#endif
