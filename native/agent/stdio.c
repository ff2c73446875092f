/* The standard streams of a process: a terminal or pipes. */
#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#ifndef TIOCGPTPEER
#define TIOCGPTPEER 0x5441
#endif

void resize_terminal(struct process *process, struct fields fields)
{
    struct winsize size = {
        .ws_row = (unsigned short)fields_number_or(fields, TAG_ROWS, 24),
        .ws_col = (unsigned short)fields_number_or(fields, TAG_COLS, 80),
    };
    int master = process->flags & START_PTY ? process->channels[0].source.fd : -1;
    if (master >= 0 && ioctl(master, TIOCSWINSZ, &size) == 0)
        gvisor_resized(process->pid);
}

static int open_slave(int master)
{
    int unlock = 0, number;
    char path[32];
    if (ioctl(master, TIOCSPTLCK, &unlock) < 0)
        return -1;
    int slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC); /* works whatever is mounted on /dev/pts */
    if (slave >= 0 || ioctl(master, TIOCGPTN, &number) < 0)
        return slave;
    snprintf(path, sizeof path, "/dev/pts/%d", number);
    return open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);
}

static int open_terminal(struct process *process, struct fields fields)
{
    struct launch *launch = &process->launch;
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (master < 0)
        return -1;
    process->channels[0].source.fd = master;
    process->input.fd = fcntl(master, F_DUPFD_CLOEXEC, FIRST_FREE_FD);
    launch->fds[0] = open_slave(master);
    if (launch->fds[0] < 0 || process->input.fd < 0)
        return -1;
    for (int i = 1; i < 3; i++)
        if ((launch->fds[i] = fcntl(launch->fds[0], F_DUPFD_CLOEXEC, FIRST_FREE_FD)) < 0)
            return -1;
    if (launch->change_user && fchown(launch->fds[0], launch->uid, (gid_t)-1) < 0 && errno != EPERM && errno != EROFS)
        return -1; /* a terminal belongs to its user */
    launch->pty = true;
    resize_terminal(process, fields);
    return 0;
}

/* Open a pipe. The agent keeps the end `ours`, which is non-blocking. */
static int open_pipe(int *ours, int *theirs, int ours_index)
{
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) < 0)
        return -1;
    *ours = fds[ours_index];
    *theirs = fds[!ours_index];
    return fcntl(*ours, F_SETFL, O_NONBLOCK);
}

/* Open a terminal as the standard error of a shell that reports its status. After a command died of a signal, bash resets the terminal
 * on its standard error, and if that is none, writes an error into the output of the command. Without terminals it is a pipe. */
static int open_error_terminal(int *ours, int *theirs)
{
    struct termios plain;
    *ours = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (*ours >= 0 && (*theirs = open_slave(*ours)) >= 0) {
        if (tcgetattr(*theirs, &plain) == 0) {
            plain.c_oflag &= ~(tcflag_t)OPOST; /* do not change the output */
            tcsetattr(*theirs, TCSANOW, &plain);
        }
        return 0;
    }
    if (*ours >= 0)
        close(*ours);
    return open_pipe(ours, theirs, 0);
}

static int open_pipes(struct process *process)
{
    int *theirs = process->launch.fds;
    struct channel *channels = process->channels;
    if (process->flags & START_STDIN && open_pipe(&process->input.fd, &theirs[0], 1) < 0)
        return -1;
    if (open_pipe(&channels[0].source.fd, &theirs[1], 0) < 0)
        return -1;
    if (process->flags & START_MERGE) {
        if ((theirs[2] = fcntl(theirs[1], F_DUPFD_CLOEXEC, FIRST_FREE_FD)) < 0)
            return -1;
    } else if (process->flags & START_STATUS) {
        return open_error_terminal(&channels[1].source.fd, &theirs[2]);
    } else if (open_pipe(&channels[1].source.fd, &theirs[2], 0) < 0) {
        return -1;
    }
    return 0;
}

int open_streams(struct process *process, struct fields fields)
{
    if ((process->flags & START_PTY ? open_terminal(process, fields) : open_pipes(process)) < 0)
        return -1;
    if (process->flags & START_STATUS)
        return open_pipe(&process->channels[2].source.fd, &process->launch.fds[3], 0);
    return 0;
}
