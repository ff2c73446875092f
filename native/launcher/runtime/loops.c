/* Our copy of the host's mounts must not keep a file system alive that the host unmounts: what lies on a loop device is let go. A
 * runtime that leaves the host's tree behind lets go of all of it; one that stays in our mount namespace does not. */
#include "runtime.h"

enum { MOUNT_POINT = 4, MAX_LINE = 3 * MAX_PATH };

static bool begins_with(const char *text, const char *start)
{
    while (*start && *text == *start)
        text++, start++;
    return !*start;
}

/* A line is `ID PARENT DEVICE ROOT MOUNT-POINT OPTIONS … - TYPE SOURCE …`, and there is no blank in a field. */
static void let_go(char *line)
{
    const char *where = NULL;
    int field = 0;
    for (char *at = line; *at; at++) {
        if (*at != ' ')
            continue;
        if (begins_with(at, " - ") && where) {
            const char *source = at + 3;
            while (*source && *source != ' ')
                source++;
            if (begins_with(source, " /dev/loop") && strcmp(where, "/"))
                CALL(umount2, where, DETACH_MOUNT | KEEP_LINK);
            return;
        }
        if (++field == MOUNT_POINT)
            where = at + 1;
        else if (field == MOUNT_POINT + 1)
            *at = '\0';
    }
}

void let_go_of_loops(void)
{
    static char piece[MAX_PATH], line[MAX_LINE];
    size_t length = 0;
    int fd = (int)need(&me, CALL(openat, AT_FDCWD, "/proc/self/mountinfo", O_RDONLY | O_CLOEXEC, 0));
    for (;;) {
        long got = need(&me, CALL(read, fd, piece, sizeof piece));
        if (got == 0)
            break;
        for (long i = 0; i < got; i++) {
            if (piece[i] != '\n') {
                length += length < MAX_LINE;
                if (length < MAX_LINE)
                    line[length - 1] = piece[i];
                continue;
            }
            if (length < MAX_LINE) { /* what is longer is cut off, and nothing of ours */
                line[length] = '\0';
                let_go(line);
            }
            length = 0;
        }
    }
    CALL(close, fd);
}
