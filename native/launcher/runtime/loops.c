/* Unmounting file systems on loop devices: this copy of the host's mounts must not keep them busy after the host unmounts them. An OCI
 * runtime that leaves the host's tree drops all of its mounts; one that stays in this mount namespace does not. */
#include "runtime.h"

enum { MOUNT_POINT = 4, MAX_LINE = 3 * MAX_PATH };

static bool begins_with(const char *text, const char *start)
{
    while (*start && *text == *start)
        text++, start++;
    return !*start;
}

/* Unmount the file system of a line `ID PARENT DEVICE ROOT MOUNT-POINT OPTIONS … - TYPE SOURCE …`. No field contains a blank. */
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
            if (length < MAX_LINE) { /* ignore longer lines, which are not loop mounts of Atoll */
                line[length] = '\0';
                let_go(line);
            }
            length = 0;
        }
    }
    CALL(close, fd);
}
