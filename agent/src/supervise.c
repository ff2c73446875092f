/* Supervisors: how the whole tree of a command can be found and killed.
 *
 * Theory of operation. Each command runs below a supervisor: a process of its own that shares our memory (CLONE_VM, so making
 * it copies nothing), is a child subreaper, and does nothing but wait. Whatever the command forks, however often and in
 * whatever session, stays below its supervisor: an orphan is handed to the nearest subreaper above it. So "the tree of
 * this command" is exactly what descends from its supervisor, and when the supervisor has no child left, it exits: the
 * tree is gone.
 *
 * Because it shares our memory, the supervisor may not touch libc's state (errno above all): everything between its clone and
 * its exit uses raw system calls and memory that was prepared for it. The command's own process is cloned from the
 * supervisor in the manner of vfork: it borrows the memory until it has executed its program or failed, and leaves the reason in
 * `stage` and `error`.
 *
 * Killing. Descendants are found in /proc. A process may fork while we look, so we kill by process group first (the kernel
 * does that atomically against fork), then one by one, and look again until the supervisor is gone.
 */
#define _GNU_SOURCE
#include "process.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define NO_SANITIZE __attribute__((no_sanitize("address", "undefined")))

static int notice_fd = -1;

int supervise_init(int fd)
{
    notice_fd = fd;
    return 0;
}

#if defined(__x86_64__)
NO_SANITIZE static inline long raw(long number, long a, long b, long c, long d)
{
    long result;
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return result;
}

/* clone(2) onto a new stack: the child calls function(argument) and exits with its result. */
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

/* Put the prepared descriptors in their places. All of them are above STATUS_FD (see process.c), so none is overwritten. */
NO_SANITIZE static long place_descriptors(const struct launch *launch)
{
    static const int places[4] = {0, 1, 2, STATUS_FD};
    for (int i = 0; i < 4; i++) {
        if (launch->fds[i] < 0)
            continue;
        long result = raw(SYS_dup3, launch->fds[i], places[i], 0, 0);
        if (result < 0)
            return result;
    }
    long first_free = launch->fds[3] < 0 ? 3 : STATUS_FD + 1;
    if (first_free != 3)
        raw(SYS_close_range, 3, STATUS_FD - 1, 0, 0);
    /* Everything else of ours is close-on-exec; this also takes what was inherited without that. */
    raw(SYS_close_range, first_free, ~0U, 4 /* CLOSE_RANGE_CLOEXEC */, 0);
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

/* The command's own process, until it has become its program. */
NO_SANITIZE static long command_main(void *argument)
{
    struct process *process = argument;
    const struct launch *launch = &process->launch;
    struct {
        void *handler;
        unsigned long flags;
        void *restorer;
        uint64_t mask;
    } action = {0};
    for (int signal = 1; signal <= 64; signal++)
        if (signal != SIGKILL && signal != SIGSTOP)
            raw(SYS_rt_sigaction, signal, (long)&action, 0, 8);
    uint64_t mask = 0;
    raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&mask, 0, 8);
    raw(SYS_setsid, 0, 0, 0, 0);
    long result = place_descriptors(launch);
    if (result == 0 && launch->pty)
        result = raw(SYS_ioctl, 0, TIOCSCTTY, 0, 0);
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
    while (raw(SYS_write, notice_fd, (long)&process, sizeof process, 0) == -EINTR)
        continue;
}

/* The supervisor: make the command's process, then wait until nothing is left below us. */
NO_SANITIZE static long supervisor_main(void *argument)
{
    struct process *process = argument;
    struct launch *launch = &process->launch;
    uint64_t all = ~(uint64_t)0;
    raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&all, 0, 8);
    raw(SYS_setpgid, 0, 0, 0, 0);
    raw(SYS_prctl, PR_SET_CHILD_SUBREAPER, 1, 0, 0);
    char *middle = (char *)launch->stack + launch->stack_size / 2;
    long pid = raw_clone(CLONE_VM | CLONE_VFORK | SIGCHLD, middle, command_main, process);
    if (pid < 0) {
        give_up(process, STAGE_SETUP, pid);
        process->ended = true;
        notice(process);
        return 1;
    }
    process->pid = (pid_t)pid;
    /* Hold no end of the command's pipes, nor anything else: the notice alone is needed from here on. */
    raw(SYS_close_range, 0, notice_fd - 1, 0, 0);
    raw(SYS_close_range, notice_fd + 1, ~0U, 0, 0);
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

/* --- finding and killing --------------------------------------------------------------------------------------------- */

struct task {
    pid_t pid, parent, group;
    char state;
    enum place { UNKNOWN, BELOW, ELSEWHERE } place;
};

static bool read_task(int proc_fd, const char *name, struct task *task)
{
    char path[32], text[512];
    snprintf(path, sizeof path, "%.10s/stat", name);
    int fd = openat(proc_fd, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return false;
    text[length] = 0;
    /* The name in parentheses may hold anything: the last parenthesis ends it. */
    const char *after = strrchr(text, ')');
    int parent, group;
    if (!after || sscanf(after + 1, " %c %d %d", &task->state, &parent, &group) != 3)
        return false;
    task->pid = (pid_t)atoi(name);
    task->parent = parent;
    task->group = group;
    task->place = UNKNOWN;
    return true;
}

/* All processes that can be seen. The caller frees the result. */
static struct task *read_tasks(size_t *count)
{
    struct task *tasks = NULL;
    size_t capacity = 0;
    *count = 0;
    DIR *proc = opendir("/proc");
    if (!proc)
        return NULL;
    for (struct dirent *entry; (entry = readdir(proc));) {
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9')
            continue;
        if (*count == capacity) {
            capacity = capacity ? capacity * 2 : 256;
            struct task *larger = realloc(tasks, capacity * sizeof *tasks);
            if (!larger)
                break;
            tasks = larger;
        }
        if (read_task(dirfd(proc), entry->d_name, &tasks[*count]))
            ++*count;
    }
    closedir(proc);
    return tasks;
}

static ssize_t find_task(const struct task *tasks, size_t count, pid_t pid)
{
    size_t low = 0, high = count; /* /proc lists processes by number */
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (tasks[middle].pid < pid)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && tasks[low].pid == pid ? (ssize_t)low : -1;
}

/* Climb from each task towards the root; what was once climbed is remembered. */
static void mark_below(struct task *tasks, size_t count, pid_t root)
{
    for (size_t i = 0; i < count; i++) {
        enum place place = UNKNOWN;
        size_t steps = 0;
        for (ssize_t at = (ssize_t)i; place == UNKNOWN && steps <= count; steps++) {
            if (tasks[at].parent == root) {
                place = BELOW;
            } else if ((at = find_task(tasks, count, tasks[at].parent)) < 0) {
                place = ELSEWHERE;
            } else {
                place = tasks[at].place;
            }
        }
        for (ssize_t at = (ssize_t)i; steps && at >= 0 && tasks[at].place == UNKNOWN; steps--) {
            tasks[at].place = place;
            at = find_task(tasks, count, tasks[at].parent);
        }
    }
}

bool kill_descendants(pid_t supervisor, pid_t spare)
{
    size_t count;
    struct task *tasks = read_tasks(&count);
    bool any = false;
    mark_below(tasks, count, supervisor);
    for (size_t i = 0; i < count; i++) {
        if (tasks[i].place != BELOW || tasks[i].pid == spare || tasks[i].state == 'Z')
            continue;
        any = true;
        if (!spare && tasks[i].group > 1 && tasks[i].group != supervisor)
            kill(-tasks[i].group, SIGKILL);
        kill(tasks[i].pid, SIGKILL);
    }
    free(tasks);
    return any;
}

void kill_strays(bool (*is_supervisor)(pid_t pid))
{
    size_t count;
    struct task *tasks = read_tasks(&count);
    pid_t self = getpid();
    for (size_t i = 0; i < count; i++) {
        if (tasks[i].parent != self || tasks[i].pid == self || is_supervisor(tasks[i].pid))
            continue;
        kill(tasks[i].pid, SIGKILL); /* its own children become strays in turn */
    }
    free(tasks);
}
