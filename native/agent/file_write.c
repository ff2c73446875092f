/* Writing a file: into a temporary file in the same directory, which is renamed at the end, or in place. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { WRITE_PARENTS = 1, WRITE_IN_PLACE = 2, WRITE_EXCLUSIVE = 4, WRITE_APPEND = 8 };

struct writer {
    int fd;
    bool exclusive;
    uint64_t written;
    char path[PATH_MAX];
    char temporary[PATH_MAX]; /* empty when writing in place */
};

static void writer_closed(struct stream *stream)
{
    struct writer *writer = stream->owner;
    close(writer->fd);
    if (writer->temporary[0])
        unlink(writer->temporary); /* the write failed or the host disconnected: leave nothing behind */
    free(writer);
}

static int write_all(int fd, const uint8_t *bytes, size_t length)
{
    while (length) {
        ssize_t written = write(fd, bytes, length);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return -1;
        bytes += written;
        length -= (size_t)written;
    }
    return 0;
}

static void writer_data(struct stream *stream, const uint8_t *bytes, size_t length)
{
    struct writer *writer = stream->owner;
    if (write_all(writer->fd, bytes, length) < 0) {
        stream_fail(stream, errno, writer->path);
        return;
    }
    writer->written += length;
    stream_consumed(stream, length);
}

/* Copy the temporary file into a target that is a mount point and so cannot be replaced. */
static int copy_over(struct writer *writer)
{
    struct stat info;
    int fd = open_regular(writer->path, O_WRONLY | O_TRUNC, &info);
    off_t offset = 0;
    int result = fd < 0 ? -1 : 0;
    while (result == 0 && (uint64_t)offset < writer->written)
        if (sendfile(fd, writer->fd, &offset, 1 << 20) <= 0)
            result = -1;
    int error = errno;
    if (fd >= 0)
        close(fd);
    return errno = error, result;
}

/* Rename the temporary file to its final name. */
static int put_in_place(struct writer *writer)
{
    int result;
    if (writer->exclusive) { /* a file of that name may have appeared meanwhile */
        result = (int)syscall(SYS_renameat2, AT_FDCWD, writer->temporary, AT_FDCWD, writer->path, 1 /* RENAME_NOREPLACE */);
        if (result < 0 && (errno == EINVAL || errno == ENOSYS))
            return link(writer->temporary, writer->path);
    } else {
        result = rename(writer->temporary, writer->path);
        if (result < 0 && errno == EBUSY)
            return copy_over(writer);
    }
    if (result == 0)
        writer->temporary[0] = 0;
    return result;
}

static void writer_end(struct stream *stream)
{
    struct writer *writer = stream->owner;
    struct builder fields;
    if (writer->temporary[0] && put_in_place(writer) < 0) {
        stream_fail(stream, errno, writer->path);
        return;
    }
    fields.length = 0;
    add_number(&fields, TAG_SIZE, writer->written);
    stream_finish(stream, &fields);
}

static int open_temporary(struct writer *writer, const struct stat *old, int64_t mode)
{
    const char *slash = strrchr(writer->path, '/');
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        return -1;
    if (snprintf(writer->temporary, sizeof writer->temporary, "%.*s/.atoll-%016llx", (int)(slash - writer->path), writer->path,
                 (unsigned long long)random) >= (int)sizeof writer->temporary) {
        writer->temporary[0] = 0;
        return errno = ENAMETOOLONG, -1;
    }
    int fd = open(writer->temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) {
        writer->temporary[0] = 0;
        return -1;
    }
    mode_t wanted = mode >= 0 ? (mode_t)mode : old ? old->st_mode & 07777 : 0644;
    if ((old && fchown(fd, old->st_uid, old->st_gid) < 0 && errno != EPERM) || fchmod(fd, wanted) < 0) {
        int error = errno;
        close(fd);
        return errno = error, -1;
    }
    return fd;
}

static int open_in_place(struct writer *writer, uint64_t flags, uint64_t offset, int64_t mode)
{
    struct stat info;
    bool exists = access(writer->path, F_OK) == 0;
    int how = O_WRONLY | O_CREAT | (flags & WRITE_EXCLUSIVE ? O_EXCL : 0) | (flags & WRITE_APPEND ? O_APPEND : 0);
    int fd = open_regular(writer->path, how, &info);
    if (fd < 0)
        return -1;
    if (((!exists || mode >= 0) && fchmod(fd, mode >= 0 ? (mode_t)mode : 0644) < 0)
        || (!(flags & WRITE_APPEND) && lseek(fd, (off_t)offset, SEEK_SET) < 0)) {
        int error = errno;
        close(fd);
        return errno = error, -1;
    }
    return fd;
}

static int open_target(struct writer *writer, uint64_t flags, uint64_t offset, int64_t mode)
{
    struct stat old;
    writer->exclusive = flags & WRITE_EXCLUSIVE;
    if (flags & WRITE_PARENTS && make_parents(writer->path) < 0)
        return -1;
    if (flags & (WRITE_IN_PLACE | WRITE_APPEND))
        return open_in_place(writer, flags, offset, mode);
    if (lstat(writer->path, &old) < 0)
        return errno == ENOENT ? open_temporary(writer, NULL, mode) : -1;
    if (writer->exclusive)
        return errno = EEXIST, -1;
    if (S_ISLNK(old.st_mode)) { /* replace the target of the link, not the link */
        char resolved[PATH_MAX];
        if (!realpath(writer->path, resolved))
            return errno == ENOENT ? open_in_place(writer, 0, 0, mode) : -1;
        strcpy(writer->path, resolved);
        if (stat(writer->path, &old) < 0)
            return -1;
    }
    if (!S_ISREG(old.st_mode))
        return errno = S_ISDIR(old.st_mode) ? EISDIR : EINVAL, -1;
    return open_temporary(writer, &old, mode);
}

void file_write(struct stream *stream, struct fields fields)
{
    static const struct stream_ops ops = {.data = writer_data, .end = writer_end, .closed = writer_closed};
    struct writer *writer = calloc(1, sizeof *writer);
    if (!writer || fields_path(fields, TAG_PATH, writer->path) < 0) {
        int error = writer ? errno : ENOMEM;
        free(writer);
        stream_fail(stream, error, "PATH");
        return;
    }
    uint64_t mode = fields_number_or(fields, TAG_MODE, UINT64_MAX);
    writer->fd = open_target(writer, fields_number_or(fields, TAG_FLAGS, 0), fields_number_or(fields, TAG_OFFSET, 0),
                             mode == UINT64_MAX ? -1 : (int64_t)(mode & 07777));
    if (writer->fd < 0) {
        int error = errno;
        if (writer->temporary[0])
            unlink(writer->temporary);
        stream_fail(stream, error, writer->path);
        free(writer);
        return;
    }
    stream_serve(stream, &ops, writer);
    stream_grant(stream, 3 * WINDOW);
}
