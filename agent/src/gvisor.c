/* What gVisor's terminals lack, made up for. Without the option --gvisor all of this does nothing.
 *
 * There /dev/tty cannot be opened (EIO, where Linux says ENXIO to a process without a terminal), nobody is told of a new window
 * size, and the characters that send a signal do so even when the program has turned that off (ISIG), unless they are
 * undefined. A version that can open /dev/tty is taken to have the rest too. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

static bool needed;

void gvisor_init(void)
{
    int fd = open("/dev/tty", O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (fd >= 0)
        close(fd);
    needed = fd < 0 && errno == EIO;
    /* Programs that ask for it by name have their terminal as standard error, as a rule. */
    if (needed && unlink("/dev/tty") == 0 && symlink("/proc/self/fd/2", "/dev/tty") < 0)
        needed = false;
}

void gvisor_resized(int master)
{
    int group;
    if (needed && ioctl(master, TIOCGPGRP, &group) == 0 && group > 1)
        kill(-group, SIGWINCH);
}

/* Write to a terminal. Characters mean a signal only if the program wants that. */
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
