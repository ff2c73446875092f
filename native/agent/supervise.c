/* Supervisors, which make it possible to find and kill the whole tree of a command.
 *
 * Each command runs below a supervisor: a separate process that shares the agent's memory (CLONE_VM, so that creating it copies
 * nothing), is a child subreaper, and only waits. Everything that the command forks, in any session, stays below its supervisor,
 * because an orphan becomes a child of the nearest subreaper above it. So the tree of a command consists of the descendants of
 * its supervisor, and the supervisor exits when it has no child left, which means that the tree is gone.
 *
 * Because it shares the agent's memory, the supervisor may not touch libc's state, above all errno: everything between its clone
 * and its exit uses raw system calls and memory that was prepared for it. The command's own process is cloned from the supervisor
 * like with vfork: it uses the same memory until it has executed its program or failed, and stores the reason in `stage` and
 * `error`.
 *
 * The supervisor has its own table of descriptors. It closes all of the agent's descriptors before it starts the command, because a
 * command whose execution hangs must not keep other commands' pipes or the host's connections open.
 */
#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_DESCRIPTORS = 65536, LAST_DESCRIPTOR = 0x7fffffff };

#define NO_SANITIZE __attribute__((no_sanitize("address", "undefined")))

#if defined(__x86_64__)
NO_SANITIZE static inline long raw(long number, long a, long b, long c, long d)
{
    long result;
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return result;
}

/* Call clone(2) with a new stack: the child calls function(argument) and exits with its result. */
NO_SANITIZE __attribute__((noinline)) static long raw_clone(unsigned long flags, void *stack, long (*function)(void *), void *argument)
{
    void **top = stack;
    *--top = argument;
    *--top = (void *)function;
    long result;
    register long r10 __asm__("r10") = 0;
    register long r8 __asm__("r8") = 0;
    __asm__ volatile("syscall\n\t"
                     "test %%rax, %%rax\n\t"
                     "jnz 1f\n\t"
                     "xor %%ebp, %%ebp\n\t"
                     "pop %%rax\n\t"
                     "pop %%rdi\n\t"
                     "call *%%rax\n\t"
                     "mov %%eax, %%edi\n\t"
                     "mov %[exit], %%eax\n\t"
                     "syscall\n\t"
                     "hlt\n"
                     "1:"
                     : "=a"(result)
                     : "a"((long)SYS_clone), "D"(flags), "S"(top), "d"(0L), "r"(r10), "r"(r8), [exit] "i"(SYS_exit_group)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
NO_SANITIZE static inline long raw(long number, long a, long b, long c, long d)
{
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    return x0;
}

NO_SANITIZE __attribute__((noinline)) static long raw_clone(unsigned long flags, void *stack, long (*function)(void *), void *argument)
{
    void **top = stack;
    *--top = argument;
    *--top = (void *)function;
    register long x8 __asm__("x8") = SYS_clone;
    register long x0 __asm__("x0") = (long)flags;
    register long x1 __asm__("x1") = (long)top;
    register long x2 __asm__("x2") = 0;
    register long x3 __asm__("x3") = 0;
    register long x4 __asm__("x4") = 0;
    __asm__ volatile("svc 0\n\t"
                     "cbnz x0, 1f\n\t"
                     "ldp x1, x0, [sp], #16\n\t"
                     "blr x1\n\t"
                     "mov x8, %[exit]\n\t"
                     "svc 0\n"
                     "1:"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), [exit] "i"(SYS_exit_group)
                     : "x30", "memory");
    return x0;
}
#else
#error "no system call layer for this architecture"
#endif

NO_SANITIZE static long give_up(struct process *process, enum stage stage, long result)
{
    process->error = (int)-result;
    process->stage = (int)stage;
    return 127;
}

/* Close a range of descriptors, one by one if the kernel has no close_range. The range must end at the last possible descriptor
 * number: gVisor interprets ~0 as -1, closes nothing and reports success. */
NO_SANITIZE static void close_between(unsigned first, unsigned last)
{
    if (raw(SYS_close_range, first, last, 0, 0) == 0)
        return;
    for (unsigned fd = first; fd <= last && fd < MOST_DESCRIPTORS; fd++)
        raw(SYS_close, fd, 0, 0, 0);
}

/* Move the prepared descriptors to their final numbers, and close everything else but the notice. The prepared ones have higher
 * numbers (see process.c), so none is overwritten; others in between are closed when the program is executed. */
NO_SANITIZE static long place_descriptors(const struct launch *launch)
{
    static const int places[4] = {0, 1, 2, STATUS_FD};
    for (int i = 0; i < 4; i++) {
        int fd = launch->fds[i] < 0 && i == 0 ? NULL_FD : launch->fds[i];
        long result = fd < 0 ? 0 : raw(SYS_dup3, fd, places[i], 0, 0);
        if (result < 0)
            return result;
    }
    close_between(NOTICE_FD + 1, LAST_DESCRIPTOR);
    return 0;
}

NO_SANITIZE static long become_user(const struct launch *launch)
{
    long result = raw(SYS_setgroups, (long)launch->group_count, (long)launch->groups, 0, 0);
    if (result == 0)
        result = raw(SYS_setresgid, launch->gid, launch->gid, launch->gid, 0);
    if (result == 0)
        result = raw(SYS_setresuid, launch->uid, launch->uid, launch->uid, 0);
    return result;
}

/* The command's own process, until it executes its program. */
NO_SANITIZE static long command_main(void *argument)
{
    struct process *process = argument;
    const struct launch *launch = &process->launch;
    /* The agent ignores no signals (see main.c), so all dispositions are the default after execution. */
    uint64_t mask = 0;
    raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&mask, 0, 8);
    raw(SYS_setsid, 0, 0, 0, 0);
    long result = launch->pty ? raw(SYS_ioctl, 0, TIOCSCTTY, 0, 0) : 0;
    if (result < 0)
        return give_up(process, STAGE_SETUP, result);
    for (size_t i = 0; i < launch->rlimit_count; i++) {
        result = raw(SYS_prlimit64, 0, launch->rlimits[i].resource, (long)&launch->rlimits[i].limit, 0);
        if (result < 0)
            return give_up(process, STAGE_SETUP, result);
    }
    if (launch->change_user && (result = become_user(launch)) < 0)
        return give_up(process, STAGE_USER, result);
    if ((result = raw(SYS_chdir, (long)launch->cwd, 0, 0, 0)) < 0)
        return give_up(process, STAGE_CWD, result);
    long error = -ENOENT;
    for (char **program = launch->programs; *program; program++) {
        result = raw(SYS_execve, (long)*program, (long)launch->argv, (long)launch->envp, 0);
        if (result != -ENOENT && result != -ENOTDIR)
            error = result;
        if (result != -ENOENT && result != -ENOTDIR && result != -EACCES)
            break;
    }
    return give_up(process, STAGE_EXEC, error);
}

NO_SANITIZE static void notice(struct process *process)
{
    while (raw(SYS_write, NOTICE_FD, (long)&process, sizeof process, 0) == -EINTR)
        continue;
}

/* The supervisor: create the command's process, then wait until no child is left. */
NO_SANITIZE static long supervisor_main(void *argument)
{
    struct process *process = argument;
    struct launch *launch = &process->launch;
    uint64_t all = ~(uint64_t)0;
    raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&all, 0, 8);
    raw(SYS_setpgid, 0, 0, 0, 0);
    raw(SYS_prctl, PR_SET_CHILD_SUBREAPER, 1, 0, 0);
    char *middle = (char *)launch->stack + launch->stack_size / 2;
    long pid = place_descriptors(launch);
    if (pid == 0)
        pid = raw_clone(CLONE_VM | CLONE_VFORK | SIGCHLD, middle, command_main, process);
    if (pid < 0) {
        give_up(process, STAGE_SETUP, pid);
        process->ended = true;
        notice(process);
        return 1;
    }
    process->pid = (pid_t)pid;
    close_between(0, NOTICE_FD - 1); /* do not keep the command's pipes open */
    if (launch->tell_started && process->stage == STAGE_NONE)
        notice(process);
    for (;;) {
        int status = 0;
        struct rusage usage;
        long found = raw(SYS_wait4, -1, (long)&status, __WALL, (long)&usage);
        if (found == -EINTR)
            continue;
        if (found < 0)
            return 0;
        if (found != pid || process->ended)
            continue;
        process->status = status;
        process->cpu_ns = (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000000u
                          + (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1000u;
        process->max_rss_bytes = (uint64_t)usage.ru_maxrss * 1024u;
        process->ended = true;
        notice(process);
    }
}

int supervise(struct process *process)
{
    struct launch *launch = &process->launch;
    long pid = raw_clone(CLONE_VM | SIGCHLD, (char *)launch->stack + launch->stack_size, supervisor_main, process);
    if (pid < 0) {
        errno = (int)-pid;
        return -1;
    }
    process->supervisor = (pid_t)pid;
    return 0;
}
