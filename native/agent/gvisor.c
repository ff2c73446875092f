/* Workarounds for gVisor. Without the option --gvisor they do nothing.
 *
 * In gVisor's terminals, /dev/tty cannot be opened (EIO, where Linux returns ENXIO to a process without a terminal), no process is
 * notified of a new window size, and the characters that send a signal do so even if the program has disabled that (ISIG), unless
 * they are undefined. A version that can open /dev/tty is assumed to have none of these problems.
 *
 * In addition, processes inside can kill the first process, which is the agent; Linux does not deliver such signals to it. So a
 * filter for the agent and its descendants suppresses system calls that would send it a signal and reports success for them. */
#define _GNU_SOURCE
#include "process.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <termios.h>
#include <unistd.h>

static bool needed;

static void guard_first_process(void)
{
    enum { CALLS = 5 };
    static const uint32_t calls[CALLS] = {SYS_kill, SYS_tkill, SYS_tgkill, SYS_rt_sigqueueinfo, SYS_rt_tgsigqueueinfo};
    struct sock_filter code[CALLS + 6] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    for (uint8_t i = 0; i < CALLS; i++)
        code[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], CALLS - 1 - i + 1, 0);
    code[CALLS + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    code[CALLS + 2] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0]));
    code[CALLS + 3] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 1, 0, 1);
    code[CALLS + 4] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO);
    code[CALLS + 5] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {.len = sizeof code / sizeof *code, .filter = code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
        perror("atoll-agent: the first process is not guarded");
}

void gvisor_init(void)
{
    guard_first_process();
    int fd = open("/dev/tty", O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (fd >= 0)
        close(fd);
    needed = fd < 0 && errno == EIO;
    /* The standard error of programs that open /dev/tty is usually their terminal. */
    if (needed && unlink("/dev/tty") == 0 && symlink("/proc/self/fd/2", "/dev/tty") < 0)
        needed = false;
}

/* gVisor does not tell which process group is in the foreground, so notify the whole session. Other programs ignore SIGWINCH. */
void gvisor_resized(pid_t session)
{
    DIR *found = needed && session > 1 ? opendir("/proc") : NULL;
    for (struct dirent *entry; found && (entry = readdir(found));) {
        pid_t pid = (pid_t)atoi(entry->d_name);
        if (pid > 1 && getsid(pid) == session)
            kill(pid, SIGWINCH);
    }
    if (found)
        closedir(found);
}

/* Write to a terminal. Characters send a signal only if the program has not disabled that. */
ssize_t gvisor_write(int master, const void *bytes, size_t length)
{
    struct termios kept, quiet;
    if (!needed || tcgetattr(master, &kept) < 0 || kept.c_lflag & ISIG)
        return write(master, bytes, length);
    quiet = kept;
    quiet.c_cc[VINTR] = quiet.c_cc[VQUIT] = quiet.c_cc[VSUSP] = _POSIX_VDISABLE;
    tcsetattr(master, TCSANOW, &quiet);
    ssize_t result = write(master, bytes, length);
    int error = errno;
    tcsetattr(master, TCSANOW, &kept);
    errno = error;
    return result;
}
