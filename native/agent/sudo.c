/* Commands as root for users inside who may: the agent's side of `sudo`.
 *
 * No set-id file has an effect in a sandbox. So the program `sudo` (sudo_client.c) asks the agent over a Unix socket, and the agent,
 * which is root inside, starts the command with the caller's standard descriptors. The kernel says who calls (SO_PEERCRED); the host
 * says who may. This gives away nothing that the sandbox does not have: its root is not the host's.
 *
 * The connection of a caller who may not is closed before anything is read. The number of callers, what they send and the time that
 * they take to send it are bounded.
 */
#define _GNU_SOURCE
#include "sudo.h"

#include "process.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { MOST_CALLERS = 64, MOST_COMMANDS = 256, MOST_USERS = 16, SEND_MS = 3000, MORE_BYTES = 8 };

struct caller {
    struct source source;
    struct timer patience;
    struct sudo_head head;
    size_t got; /* of the head and of the fields together */
    uint8_t *bytes;
    int fds[SUDO_FDS];
    struct process *process; /* NULL: not started yet */
};

static struct source door = {.fd = -1};
static char *users[MOST_USERS];
static size_t user_count;
static unsigned callers, commands;

#define CALLER(pointer, member) ((struct caller *)((char *)(pointer)-offsetof(struct caller, member)))

/* --- who may ------------------------------------------------------------------------------------------------------------------ */

static bool may(uid_t uid)
{
    for (size_t i = 0; i < user_count; i++) {
        uid_t found;
        if (account_uid(users[i], &found) && found == uid)
            return true;
    }
    return uid == 0;
}

static void forget_users(void)
{
    while (user_count)
        free(users[--user_count]);
}

/* --- answers -------------------------------------------------------------------------------------------------------------------- */

static void hang_up(struct caller *caller)
{
    timer_set(&caller->patience, 0);
    source_close(&caller->source);
    for (int i = 0; i < SUDO_FDS; i++)
        if (caller->fds[i] >= 0)
            close(caller->fds[i]);
    free(caller->bytes);
    if (caller->process)
        caller->process->caller = NULL;
    free_later(caller);
    callers--;
    if (door.fd >= 0)
        source_watch(&door, EPOLLIN);
}

static void reply(int fd, enum sudo_answer answer, uint32_t number)
{
    struct sudo_reply said = {(uint32_t)answer, number};
    ssize_t length = send(fd, &said, sizeof said, MSG_NOSIGNAL | MSG_DONTWAIT); /* it fits into the buffer of a new connection */
    (void)length;
}

static void answer(struct caller *caller, enum sudo_answer what, uint32_t number)
{
    reply(caller->source.fd, what, number);
    hang_up(caller);
}

void sudo_ended(struct process *process)
{
    struct caller *caller = process->caller;
    if (!caller)
        return;
    if (process->stage != STAGE_NONE)
        answer(caller, SUDO_FAILED, (uint32_t)process->error);
    else
        answer(caller, SUDO_ENDED, (uint32_t)process->status);
}

void sudo_dropped(void) { commands--; }

/* --- a request ------------------------------------------------------------------------------------------------------------------ */

static void start(struct caller *caller)
{
    struct fields fields = {caller->bytes, caller->head.length};
    struct field field;
    if (!fields_valid(fields)) {
        answer(caller, SUDO_FAILED, EPROTO);
        return;
    }
    if (!fields_find(fields, TAG_ARG, &field)) {
        answer(caller, SUDO_ALLOWED, 0);
        return;
    }
    struct process *process = commands < MOST_COMMANDS ? process_without_id() : NULL;
    if (!process) {
        answer(caller, SUDO_FAILED, EAGAIN);
        return;
    }
    commands++;
    process->by_sudo = true;
    process->flags = START_FORGET;
    process->started_ns = now_ns();
    bool failed = launch_prepare(&process->launch, fields) < 0;
    int error = errno;
    if (!failed) {
        memcpy(process->launch.fds, caller->fds, sizeof caller->fds);
        for (int i = 0; i < SUDO_FDS; i++)
            caller->fds[i] = -1; /* the process has them now */
        process->launch.pty = fields_number_or(fields, TAG_FLAGS, 0) & START_PTY;
        calm_down();
        failed = supervise(process) < 0;
        error = errno;
        launch_close(&process->launch);
    }
    if (failed) {
        process_drop(process);
        answer(caller, SUDO_FAILED, (uint32_t)error);
        return;
    }
    timer_set(&caller->patience, 0);
    free(caller->bytes);
    caller->bytes = NULL;
    caller->process = process;
    process->caller = caller;
}

static bool take_descriptors(struct caller *caller, const struct cmsghdr *part)
{
    size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    bool fit = count == SUDO_FDS && caller->fds[0] < 0;
    for (size_t i = 0; i < count; i++) {
        int fd;
        memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
        if (fit)
            caller->fds[i] = fd;
        else
            close(fd);
    }
    return fit;
}

/* Take what came with a part of the request: its sender, and the descriptors. What does not fit into the buffer, the kernel closes. */
static bool take_attached(struct caller *caller, struct msghdr *message)
{
    bool good = !(message->msg_flags & MSG_CTRUNC), is_known = false;
    for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part; part = CMSG_NXTHDR(message, part)) {
        if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS) {
            good &= take_descriptors(caller, part);
        } else if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_CREDENTIALS) {
            struct ucred sender;
            memcpy(&sender, CMSG_DATA(part), sizeof sender);
            is_known = may(sender.uid);
        }
    }
    return good && is_known;
}

/* Read what has come of the request. Returns 1: all of it; 0: more will come; -1: it is no request. */
static int read_request(struct caller *caller)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(SUDO_FDS * sizeof(int)) + CMSG_SPACE(sizeof(struct ucred))];
    } control;
    for (;;) {
        bool in_head = caller->got < sizeof caller->head;
        size_t done = in_head ? caller->got : caller->got - sizeof caller->head;
        size_t most = (in_head ? sizeof caller->head : caller->head.length) - done;
        struct iovec part = {(in_head ? (uint8_t *)&caller->head : caller->bytes) + done, most};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        ssize_t length = most ? recvmsg(caller->source.fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) : 0;
        if (length < 0 && errno == EINTR)
            continue;
        if (length < 0)
            return errno == EAGAIN ? 0 : -1;
        if (most && (!length || !take_attached(caller, &message)))
            return -1;
        caller->got += (size_t)length;
        if (caller->got < sizeof caller->head)
            continue;
        if (!caller->bytes) {
            if (caller->head.magic != SUDO_MAGIC || caller->head.length > MOST_SUDO_BYTES || caller->fds[0] < 0)
                return -1;
            caller->bytes = malloc(caller->head.length + 1);
            if (!caller->bytes)
                return -1;
        }
        if (caller->got == sizeof caller->head + caller->head.length)
            return 1;
    }
}

/* The command runs: each byte is a signal. The end of the connection means that the caller is gone. */
static void read_signals(struct caller *caller)
{
    uint8_t signals[MORE_BYTES];
    struct process *process = caller->process;
    ssize_t length = read(caller->source.fd, signals, sizeof signals);
    if (length < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (length <= 0) {
        hang_up(caller);
        start_kill(process, CAUSE_KILLED);
        return;
    }
    for (ssize_t i = 0; i < length; i++)
        send_signal(process, signals[i], false);
}

static void caller_ready(struct source *source, uint32_t events)
{
    struct caller *caller = CALLER(source, source);
    (void)events;
    if (caller->process) {
        read_signals(caller);
        return;
    }
    int result = read_request(caller);
    if (result > 0)
        start(caller);
    else if (result < 0)
        answer(caller, SUDO_REFUSED, EPERM);
}

static void patience_over(struct timer *timer) { hang_up(CALLER(timer, patience)); }

static void admit(int fd)
{
    struct caller *caller = calloc(1, sizeof *caller);
    if (!caller) {
        close(fd);
        return;
    }
    caller->source = (struct source){.fd = fd, .ready = caller_ready};
    caller->patience.fire = patience_over;
    for (int i = 0; i < SUDO_FDS; i++)
        caller->fds[i] = -1;
    callers++;
    int on = 1;
    static const char ready = SUDO_READY;
    bool asked = setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0 && send(fd, &ready, 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1;
    timer_set(&caller->patience, now_ns() + (uint64_t)SEND_MS * MS);
    if (!asked || source_watch(&caller->source, EPOLLIN) < 0)
        hang_up(caller);
}

static void open_again(struct timer *timer)
{
    (void)timer;
    source_watch(&door, EPOLLIN);
}

static struct timer door_again = {.fire = open_again};

static void door_ready(struct source *source, uint32_t events)
{
    (void)events;
    for (int turn = 0; turn < 16; turn++) { /* others want the agent too */
        struct ucred who;
        socklen_t length = sizeof who;
        if (callers >= MOST_CALLERS) {
            source_watch(source, 0); /* until one hangs up */
            return;
        }
        int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && errno != EAGAIN && errno != ECONNABORTED && errno != EINTR) {
            source_watch(source, 0); /* no descriptors or no memory: an immediate retry would fail again */
            timer_set(&door_again, now_ns() + 100 * MS);
        }
        if (fd < 0)
            return;
        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &length) == 0 && may(who.uid)) {
            admit(fd);
        } else {
            close(fd);
        }
    }
}

/* --- switched on by the host -------------------------------------------------------------------------------------------------- */

static int open_door(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SUDO_SOCKET};
    struct stat info;
    if (door.fd >= 0)
        return 0;
    mkdir("/run", 0755);
    mkdir("/run/atoll", 0755);
    if (lstat("/run/atoll", &info) < 0 || !S_ISDIR(info.st_mode) || info.st_uid != geteuid() || info.st_mode & 022)
        return errno = EPERM, -1; /* somebody else's directory: the program there could be anything */
    unlink(address.sun_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || chmod(address.sun_path, 0666) < 0 || listen(fd, 128) < 0) {
        int error = errno;
        close(fd);
        return errno = error, -1;
    }
    door = (struct source){.fd = fd, .ready = door_ready};
    return source_watch(&door, EPOLLIN);
}

void sudo_allow(struct stream *stream, struct fields fields)
{
    struct field field;
    forget_users();
    while (fields_next(&fields, &field)) {
        if (field.tag != TAG_USER || user_count == MOST_USERS || memchr(field.value, 0, field.length))
            continue;
        users[user_count] = strndup((const char *)field.value, field.length);
        user_count += users[user_count] != NULL;
    }
    if (!user_count) {
        source_close(&door); /* nobody may any more, and root needs no help */
        timer_set(&door_again, 0);
        stream_finish(stream, NULL);
    } else if (geteuid() != 0)
        stream_fail(stream, EPERM, "the agent is not root");
    else if (open_door() < 0)
        stream_fail(stream, errno, SUDO_SOCKET);
    else
        stream_finish(stream, NULL);
}
