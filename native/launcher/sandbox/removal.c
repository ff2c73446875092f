/* Removing a tree that a sandbox of an ordinary user left. Its files belong to ids that only the user's namespace maps, and its
 * directories may have no permissions. No link is followed: each step uses a name in an open directory. */
#include "sandbox.h"

enum { ENTRIES = 8192 };

struct entry { /* struct linux_dirent64 */
    uint64_t inode;
    int64_t offset;
    unsigned short length;
    unsigned char type;
    char name[];
};

static int open_directory(int at, const char *name)
{
    return (int)CALL(openat, at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
}

static bool is_itself_or_parent(const char *name)
{
    return name[0] == '.' && (!name[1] || (name[1] == '.' && !name[2]));
}

/* Remove all files and empty directories of a directory. Returns 1 if there is a directory that is not empty, with its NAME. */
static long empty_one(struct worker *worker, int directory, char *name)
{
    static char entries[ENTRIES] __attribute__((aligned(8)));
    for (;;) {
        need(worker, CALL(lseek, directory, 0, 0));
        long got = CALL(getdents64, directory, entries, ENTRIES), removed = 0;
        if (got == -ENOENT) /* another process has removed it meanwhile */
            return 0;
        need(worker, got);
        for (long at = 0; at < got;) {
            struct entry *entry = (struct entry *)(void *)(entries + at);
            at += entry->length;
            if (is_itself_or_parent(entry->name))
                continue;
            long error = CALL(unlinkat, directory, entry->name, 0);
            if (error == -EISDIR || error == -EPERM)
                error = CALL(unlinkat, directory, entry->name, AT_REMOVEDIR);
            if (error == -ENOTEMPTY) {
                size_t length = strlen(entry->name);
                if (length > MAX_NAME)
                    worker->give_up(worker, ENAMETOOLONG);
                memcpy(name, entry->name, length + 1);
                return 1;
            }
            if (error != -ENOENT)
                need(worker, error);
            removed++;
        }
        if (!removed)
            return 0;
    }
}

/* Remove a tree of any depth with two descriptors and one name: descend to a directory without subdirectories, then start again. */
void remove_tree(struct worker *worker, const char *path)
{
    char name[MAX_NAME + 1];
    for (;;) {
        int here = open_directory(AT_FDCWD, path), deeper;
        if (here == -ENOENT)
            return;
        need(worker, here);
        bool top = true;
        while (empty_one(worker, here, name)) {
            top = false;
            deeper = open_directory(here, name);
            if (deeper == -ENOENT)
                break;
            need(worker, deeper);
            CALL(close, here);
            here = deeper;
        }
        CALL(close, here);
        if (top)
            break;
    }
    long error = CALL(unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
    if (error != -ENOENT)
        need(worker, error);
}
