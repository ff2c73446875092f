/*
 * atoll-mount supervise: decides about set-id bits for one sandbox that has a writable volume.
 *
 * A program that is set-uid in a volume is set-uid on the host. The filter of system calls cannot see where a path leads, so in a
 * sandbox with a writable volume it passes every call that would set such a bit (chmod and its family, open with O_CREAT) to this
 * process, which executes it instead of the caller: with the bits on the sandbox's own files, without them everywhere else. The
 * caller's own call is never continued, because another thread could change its path after the check.
 *
 * Each call is executed by a new child that first takes over the caller's identity: it joins the caller's user namespace and adopts its
 * root directory, working directory, ids, groups, capabilities and umask. So it can do no more than the caller could, and follows no
 * link that the caller could not follow. It also joins the caller's network and IPC namespaces, because the content of /proc/sys
 * depends on them. It examines the file that it has opened and never resolves the path again. It is in no PID namespace of the sandbox,
 * so processes inside cannot address it.
 *
 * The process that installs the filter sends the listener over a socket. Before it come two lists of control groups, to join
 * immediately and once the listener has arrived: an OCI runtime does not accept a group that has processes. This process ends when the
 * last process under the filter has ended. If it dies first, the intercepted calls fail, so none is let through.
 */
#include <linux/poll.h>
#include <linux/uio.h>

#include "supervisor.h"

enum { SECONDS = 5, MAX_LISTS = 1 << 16 };

static int listener;
static bool virtual_kernel;

static void answer(uint64_t id, long error)
{
    struct seccomp_notif_resp response = {.id = id, .error = (int)error};
    CALL(ioctl, listener, SECCOMP_IOCTL_NOTIF_SEND, &response);
}

static void hand_over(const struct call *call, int fd)
{
    struct seccomp_notif_addfd added = {.id = call->id, .srcfd = (uint32_t)fd, .newfd_flags = (uint32_t)(call->flags & O_CLOEXEC)};
    added.flags = SECCOMP_ADDFD_FLAG_SEND;
    long number = CALL(ioctl, listener, SECCOMP_IOCTL_NOTIF_ADDFD, &added);
    if (number >= 0)
        return;
    if (number != -EINVAL) { /* the caller has too many descriptors, or is gone */
        answer(call->id, number);
        return;
    }
    added.flags = 0; /* Linux before 5.14 needs two steps */
    number = CALL(ioctl, listener, SECCOMP_IOCTL_NOTIF_ADDFD, &added);
    struct seccomp_notif_resp response = {.id = call->id, .val = number, .error = number < 0 ? (int)number : 0};
    CALL(ioctl, listener, SECCOMP_IOCTL_NOTIF_SEND, &response);
}

/* Returns the result for the caller, or 0 if it was answered already. */
static long act(const struct seccomp_notif *asked)
{
    static struct caller caller;
    static struct call call = {.at = AT_FDCWD};
    long timer[4] = {0, 0, SECONDS, 0};
    CALL(setitimer, 0 /* ITIMER_REAL */, timer, NULL);
    struct place place = {.with_virtual_kernel = virtual_kernel};
    place.answers = (int)CALL(openat, AT_FDCWD, "/proc/self/fd", O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
    if (place.answers < 0 || open_caller(&caller, asked->pid) < 0)
        return -EPERM;
    long error = understand(&caller, asked, &call);
    if (CALL(ioctl, listener, SECCOMP_IOCTL_NOTIF_ID_VALID, &call.id) != 0) /* the data may have been read from another process */
        return 0;
    if (error < 0)
        return error;
    if (become(&caller) < 0)
        return -EPERM;
    place.root = caller.root;
    long result = carry_out(&call, &place);
    if (result < 0)
        return result;
    if (call.makes)
        hand_over(&call, (int)result);
    else
        answer(call.id, 0);
    return 0;
}

static void serve_one(const struct seccomp_notif *asked)
{
    int status = 0;
    long child = fork_process();
    if (child == 0) {
        long error = act(asked);
        if (error)
            answer(asked->id, error);
        leave(0);
    }
    if (child < 0 || CALL(wait4, child, &status, 0, NULL) < 0 || status)
        answer(asked->id, child < 0 ? -EAGAIN : -EPERM);
}

static void serve(void)
{
    for (;;) {
        struct pollfd waiting = {.fd = listener, .events = POLLIN};
        struct seccomp_notif asked = {0};
        long found = CALL(ppoll, &waiting, 1, NULL, NULL, 0);
        if (found < 0 && found != -EINTR)
            return;
        if (!(waiting.revents & POLLIN)) {
            if (waiting.revents)
                return; /* no process is left under the filter */
            continue;
        }
        long error = CALL(ioctl, listener, SECCOMP_IOCTL_NOTIF_RECV, &asked);
        if (error == 0)
            serve_one(&asked);
        else if (error != -ENOENT && error != -EINTR) /* ENOENT: the caller was killed meanwhile */
            return;
    }
}

/* -- start -- */

/* Join control groups, given as lists that end with NUL. If a group is gone, the sandbox is gone, too. */
static void join(const char *lists, size_t length)
{
    for (const char *list = lists; list < lists + length; list += strlen(list) + 1) {
        long fd = CALL(openat, AT_FDCWD, list, O_WRONLY | O_CLOEXEC, 0);
        if (fd < 0 || CALL(write, fd, "0", 1) != 1)
            leave(125);
        CALL(close, fd);
    }
}

static size_t receive_lists(int channel, char *lists)
{
    long length = CALL(recvfrom, channel, lists, MAX_LISTS - 1, 0, NULL, NULL);
    if (length <= 0)
        leave(125);
    return (size_t)length - 1; /* the message ends with one more NUL, so that it is never empty */
}

static int receive_listener(int channel)
{
    char byte;
    struct rights rights = {0};
    struct iovec part = {&byte, 1};
    struct message message = {.parts = &part, .part_count = 1, .control = &rights, .control_length = sizeof rights};
    if (CALL(recvmsg, channel, &message, CLOEXEC_RIGHTS) != 1)
        return -1;
    bool is_one = message.control_length >= RIGHTS_HEADER && rights.type == RIGHTS_TYPE && rights.length == RIGHTS_HEADER + sizeof(int);
    return is_one ? rights.fds[0] : -1;
}

_Noreturn void supervise(int channel, bool with_virtual_kernel)
{
    static char lists[MAX_LISTS], lasting[MAX_LISTS];
    virtual_kernel = with_virtual_kernel;
    long child = fork_process();
    if (child)
        leave(child < 0 ? 125 : 0);
    if (CALL(setsid) < 0 || CALL(chdir, "/") < 0)
        leave(125);
    size_t length = receive_lists(channel, lists), lasting_length = receive_lists(channel, lasting);
    join(lists, length);
    listener = receive_listener(channel);
    CALL(close, channel);
    if (listener < 0)
        leave(0);
    join(lasting, lasting_length);
    serve();
    leave(0);
}
