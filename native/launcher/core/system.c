/* The entry point, clone3, and the functions that the compiler expects from a C library. */
#include "system.h"

#include "core.h"

#if defined(__x86_64__)
__asm__(".globl _start\n"
        "_start:\n"
        "    xor %ebp, %ebp\n"
        "    mov %rsp, %rdi\n"
        "    and $-16, %rsp\n"
        "    call start\n"
        "    hlt\n"
        ".globl start_process\n"
        "start_process:\n"
        "    mov %rdx, %r8\n"
        "    mov $435, %eax\n"
        "    syscall\n"
        "    test %rax, %rax\n"
        "    jz 1f\n"
        "    ret\n"
        "1:  xor %ebp, %ebp\n"
        "    call *%r8\n"
        "    hlt\n");
#elif defined(__aarch64__)
__asm__(".globl _start\n"
        "_start:\n"
        "    mov x29, #0\n"
        "    mov x0, sp\n"
        "    bl start\n"
        "    brk #0\n"
        ".globl start_process\n"
        "start_process:\n"
        "    mov x8, #435\n"
        "    svc 0\n"
        "    cbz x0, 1f\n"
        "    ret\n"
        "1:  mov x29, #0\n"
        "    blr x2\n"
        "    brk #0\n");
#endif

void *memcpy(void *restrict to, const void *restrict from, size_t length)
{
    unsigned char *out = to;
    const unsigned char *in = from;
    for (size_t i = 0; i < length; i++)
        out[i] = in[i];
    return to;
}

void *memset(void *to, int byte, size_t length)
{
    unsigned char *out = to;
    for (size_t i = 0; i < length; i++)
        out[i] = (unsigned char)byte;
    return to;
}

size_t strlen(const char *text)
{
    size_t length = 0;
    while (text[length])
        length++;
    return length;
}

int strcmp(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return (unsigned char)*a - (unsigned char)*b;
}

_Noreturn void start(long *stack)
{
    run((int)stack[0], (char **)(stack + 1));
}
