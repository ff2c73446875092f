/*
 * rehearsal ROUNDS SEED FILE...: a fuzzer that runs the launcher with damaged plans and a simulated kernel.
 *
 * The launcher is compiled with sanitizers and a C library. Its system calls are implemented here: they check their arguments, access
 * every byte that the kernel would access, and return possible results, including errors. Each FILE holds the frames of a valid plan.
 * In every round one plan is damaged at random, reproducibly for each seed, and a child runs the launcher on it. If the child ends in
 * a way in which the launcher never does, that is a bug; its round is printed, and `rehearsal 1 SEED+ROUND FILE...` repeats it. With 0
 * rounds each plan is run unchanged, all calls succeed, and the exit status tells whether the agent would have been executed.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <linux/stat.h>
#include <sanitizer/asan_interface.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../launcher/sandbox/sandbox.h"

enum { LARGEST_INPUT = 1 << 20, FIRST_FD = 20, EXECUTED = 7 };

static unsigned char input[LARGEST_INPUT], spoilt[LARGEST_INPUT];
static size_t input_length, at;
static uint64_t state;
static int next_fd = FIRST_FD, reports, started;
static void (*entry)(void);
static volatile unsigned char sink;
static bool calm;

static uint64_t any(uint64_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return below ? state % below : 0;
}

/* Return true once in `often` calls, or never if all calls must succeed. */
static bool fails(uint64_t often)
{
    return !calm && !any(often);
}

static void touch(const void *memory, size_t length)
{
    for (size_t i = 0; i < length; i++)
        sink ^= ((const unsigned char *)memory)[i];
}

static void text(long pointer)
{
    if (pointer)
        touch((const char *)pointer, strlen((const char *)pointer) + 1);
}

/* Forbid access to the memory behind the words that have arrived. */
void rehearse_memory(char *memory, size_t used, size_t size)
{
    ASAN_UNPOISON_MEMORY_REGION(memory, used);
    ASAN_POISON_MEMORY_REGION(memory + used, size - used);
}

static long receive_some(struct message *message)
{
    /* An int for each half of the length, then level, type and two or three descriptors. */
    static const int rights[] = {0, 0, 1, 1, 11, 12, 13};
    struct iovec *part = message->parts;
    size_t length = input_length - at < part->iov_len ? input_length - at : part->iov_len;
    if (length > 1 && fails(4))
        length = 1 + any(length - 1);
    memcpy(part->iov_base, input + at, length);
    at += length;
    if (message->control_length >= sizeof rights && !fails(8)) {
        memcpy(message->control, rights, sizeof rights);
        *(size_t *)message->control = fails(16) ? any(64) : any(2) ? 24 : 28;
        message->control_length = sizeof rights;
    } else {
        message->control_length = 0;
    }
    return (long)length;
}

static long entries(char *buffer, size_t size)
{
    static int left = 3;
    size_t name = any(256), length = (19 + name + 1 + 7) & ~(size_t)7;
    if (!left-- || length > size)
        return 0;
    memset(buffer, 0, length);
    memcpy(buffer + 16, &(unsigned short){(unsigned short)length}, 2);
    memset(buffer + 19, 'x', name);
    return (long)length;
}

static long wait_for(int *word, int value)
{
    if (*word != value)
        return -EAGAIN;
    if (word == &shared.alive && entry) {
        void (*first)(void) = entry;
        entry = NULL;
        first();
    }
    _exit(0); /* nothing would ever wake it; in reality the other process ends it */
}

static long execute(char **arguments, char **environment)
{
    for (; *arguments; arguments++)
        text((long)*arguments);
    for (; *environment; environment++)
        text((long)*environment);
    _exit(calm ? EXECUTED : 0);
}

static long descriptor(void)
{
    return fails(64) ? -(long)(1 + any(40)) : next_fd++;
}

long system_call(long number, long a, long b, long c, long d, long e, long f)
{
    (void)e, (void)f;
    switch (number) {
    case __NR_recvmsg: return receive_some((struct message *)b);
    case __NR_sendto: touch((void *)b, (size_t)c); return ++reports > 3 ? -EPIPE : c;
    case __NR_exit_group: _exit(0);
    case __NR_futex: return b == FUTEX_WAIT ? wait_for((int *)a, (int)c) : 0;
    case __NR_execveat: return execute((char **)c, (char **)d);
    case __NR_write: touch((void *)b, (size_t)c); return fails(64) ? -EINVAL : c;
    case __NR_sethostname: touch((void *)a, (size_t)b); return 0;
    case __NR_openat: case __NR_openat2: case __NR_open_tree: text(b); return fails(8) ? -ENOENT : descriptor();
    case __NR_fsopen: text(a); return descriptor();
    case __NR_fsconfig: text(c), text(d); return fails(64) ? -EINVAL : 0;
    case __NR_fsmount: case __NR_pidfd_open: case __NR_socket: case __NR_fcntl: return descriptor();
    case __NR_mknodat: case __NR_mkdirat: case __NR_unlinkat: case __NR_fchownat: case __NR_mount_setattr:
        text(b);
        return !fails(16) ? 0 : any(2) ? -ENOTEMPTY : -ENOENT;
    case __NR_symlinkat: text(a), text(c); return 0;
    case __NR_move_mount: text(b), text(d); return !fails(8) ? 0 : any(2) ? -EINVAL : -ENOENT;
    case __NR_mount: text(a), text(b), text(c), text(e); return fails(32) ? -EPERM : 0;
    case __NR_pivot_root: case __NR_chdir: case __NR_chroot: case __NR_umount2: text(a); return fails(32) ? -ENOENT : 0;
    case __NR_statx:
        *(struct statx *)e = (struct statx){.stx_mode = fails(2) ? S_IFREG : S_IFDIR, .stx_uid = fails(8) ? 0 : 1000, .stx_gid = 1000};
        return 0;
    case __NR_sendmsg: {
        struct message *message = (struct message *)b;
        touch(message->parts->iov_base, message->parts->iov_len), touch(message->control, message->control_length);
        return fails(8) ? -EPIPE : 1;
    }
    case __NR_getdents64: return entries((char *)b, (size_t)c);
    case __NR_setfsuid: return fails(16) ? 0 : a;
    case __NR_getcwd: memcpy((char *)a, "/w", 3); return 3;
    case __NR_seccomp: touch(*(void **)(c + 8), *(unsigned short *)c * (size_t)8); return 0;
    case __NR_prctl: return a == 24 && b > 40 ? -EINVAL : 0;
    default: return 0;
    }
}

long start_process(void *arguments, size_t size, void (*first)(void))
{
    touch(arguments, size);
    if (!entry && !started++) /* the first one is the sandbox's; others only keep a namespace alive */
        entry = first;
    return 4711;
}

/* -- damaging a plan: changed bytes, words and lengths, pieces removed and duplicated -- */

/* The frame that contains WHERE has become longer. Usually correct its length, so that the frames after it stay valid. */
static void fix_length(size_t where, size_t more)
{
    uint32_t length;
    if (any(8))
        for (size_t frame = 0; frame + 4 <= input_length; frame += 4 + length) {
            memcpy(&length, input + frame, 4);
            if (where >= frame + 4 && where < frame + 4 + length) {
                length += (uint32_t)more;
                memcpy(input + frame, &length, 4);
                return;
            }
        }
}

static void spoil(void)
{
    for (uint64_t times = any(6); times && input_length > 8; times--) {
        size_t where = any(input_length), length = any(64);
        switch (any(9)) {
        case 0: input[where] = (unsigned char)any(256); break;
        case 1: input[where] = 0; break;
        case 2: input[where] = (unsigned char)('0' + any(10)); break;
        case 3: { /* possibly a length */
            uint32_t number = (uint32_t)any(any(2) ? 1 << 24 : 300);
            memcpy(input + where % (input_length - 4), &number, sizeof number);
            break;
        }
        case 4: input_length = where ? where : 1; break;
        case 5: /* remove a piece */
            length = length > input_length - where ? input_length - where : length;
            memmove(input + where, input + where + length, input_length - where - length);
            input_length -= length;
            break;
        case 6: case 7: /* enlarge a number */
            while (where < input_length && (input[where] < '0' || input[where] > '9'))
                where++;
            length = 1 + any(4);
            if (where == input_length || input_length + length > LARGEST_INPUT)
                break;
            memmove(input + where + length, input + where, input_length - where);
            for (size_t i = 0; i < length; i++)
                input[where + i] = (unsigned char)('0' + any(10));
            input_length += length;
            fix_length(where, length);
            break;
        default: /* duplicate a piece */
            length = length > input_length - where ? input_length - where : length;
            if (input_length + length > LARGEST_INPUT)
                break;
            memcpy(spoilt, input + where, length);
            memmove(input + where + length, input + where, input_length - where);
            memcpy(input + where, spoilt, length);
            input_length += length;
        }
    }
}

static void load(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        exit(2);
    input_length = fread(input, 1, sizeof input, file);
    fclose(file);
}

static int play(void)
{
    pid_t child = fork();
    if (child == 0) {
        alarm(10);
        run(0, NULL);
    }
    int status;
    waitpid(child, &status, 0);
    return status;
}

int main(int count, char **arguments)
{
    if (count < 4)
        return 2;
    unsigned long rounds = strtoul(arguments[1], NULL, 10), seed = strtoul(arguments[2], NULL, 10);
    calm = !rounds;
    for (int file = 3; calm && file < count; file++) {
        load(arguments[file]);
        printf("%d\n", WEXITSTATUS(play()));
        fflush(stdout);
    }
    for (unsigned long round = 0; round < rounds; round++) {
        state = (seed + round) * 0x9E3779B97F4A7C15ull | 1;
        any(1);
        load(arguments[3 + any((uint64_t)count - 3)]);
        spoil();
        int status = play();
        if (status) {
            printf("round %lu (seed %lu): status %d\n", round, seed + round, status);
            return 1;
        }
    }
    return 0;
}
