/* Operations on the sandbox's own tree. They are executed as root of the sandbox's user namespace, who has no rights outside, so a
 * bug here cannot affect anything that the sandbox could not affect by itself. */
#include "core.h"

enum { TYPE_MISMATCH = EINVAL };
static const char *const NULLS[] = {"null", "null-directory"};

/* Mount the stage over PATH and change into it. It holds all mounts until the new root is complete. */
void enter_stage(struct worker *worker, const char *path, int stage)
{
    need(worker, attach(stage, AT_FDCWD, path));
    need(worker, CALL(fchdir, stage));
    for (int kind = 0; kind < 2; kind++) {
        int tree = clone_tree(worker, AT_FDCWD, NULLS[kind], 0, attribute_flags("ro,nosuid,nodev,noexec"), -1);
        need(worker, attach(tree, AT_FDCWD, NULLS[kind]));
        CALL(close, tree);
    }
}

/* cover PATH: hide a file or directory behind an empty one. A path that does not exist is ignored. */
static void cover(struct worker *worker, struct tree *tree, const char *path)
{
    for (int kind = 0; kind < 2; kind++) {
        if (tree->covers[kind] < 0)
            tree->covers[kind] = clone_tree(worker, AT_FDCWD, NULLS[kind], 0, 0, -1);
        long error = attach(tree->covers[kind], tree->base, path);
        if (error == -TYPE_MISMATCH && kind == 0)
            continue;
        if (error == -ENOENT)
            return;
        need(worker, error);
        CALL(close, tree->covers[kind]);
        tree->covers[kind] = -1;
        return;
    }
}

/* shadow NAME PATH CONTENT: replace a file of the kernel by a read-only one with this text. */
static void shadow(struct worker *worker, const struct tree *tree, const char *name)
{
    char *path = next_word(worker), *content = next_word(worker);
    int file = (int)need(worker, CALL(openat, AT_FDCWD, name, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0444));
    write_text(worker, file, content);
    CALL(close, file);
    int mount = clone_tree(worker, AT_FDCWD, name, 0, attribute_flags("ro,nosuid,nodev,noexec"), -1);
    need(worker, attach(mount, tree->base, path));
    CALL(close, mount);
}

/* Attach a detached mount at its path inside the root. */
static void put(struct worker *worker, const struct tree *tree, int mount, const char *target, bool strict)
{
    int at = mount_point(worker, tree->root, target, is_directory(worker, mount), strict);
    need(worker, attach(mount, at, ""));
    CALL(close, at);
}

static void directory(struct worker *worker, const struct tree *tree, const char *path)
{
    unsigned long mode = next_number(worker);
    int at = open_inside(tree->root, path, 0, O_PATH | O_DIRECTORY);
    if (at == -ENOENT) {
        at = mount_point(worker, tree->root, path, true, false);
        int readable = (int)need(worker, CALL(openat, at, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
        need(worker, CALL(fchmod, readable, mode));
        CALL(close, readable);
    }
    need(worker, at);
    CALL(close, at);
}

static void change_directory(struct worker *worker, const char *path)
{
    char here[MAX_PATH];
    need(worker, CALL(chdir, path));
    need(worker, CALL(getcwd, here, sizeof here));
    if (here[0] != '/') /* the directory is outside the root */
        worker->give_up(worker, ENOENT);
}

static int open_base(struct worker *worker, const char *path)
{
    struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_SYMLINKS};
    return (int)need(worker, CALL(openat2, AT_FDCWD, path, &how, sizeof how));
}

/* Operations on the stage, whose names are relative to the current directory. */
static bool stage_operation(struct worker *worker, struct tree *tree, const char *op)
{
    if (!strcmp(op, "enter-stage")) { /* enter-stage PATH SLOT */
        const char *path = next_subject(worker);
        enter_stage(worker, path, take(worker, next_number(worker)));
    } else if (!strcmp(op, "mkdir")) {
        need(worker, CALL(mkdirat, AT_FDCWD, next_subject(worker), 0755));
    } else if (!strcmp(op, "attach")) { /* attach NAME SLOT: mount on a new directory */
        const char *name = next_subject(worker);
        need(worker, CALL(mkdirat, AT_FDCWD, name, 0755));
        need(worker, attach(take(worker, next_number(worker)), AT_FDCWD, name));
    } else if (!strcmp(op, "sys")) { /* sys NAME SLOT: staged, so that it can be covered before it is placed */
        const char *name = next_subject(worker);
        tree->base = take(worker, next_number(worker));
        need(worker, attach(tree->base, AT_FDCWD, name));
    } else if (!strcmp(op, "base")) { /* base PATH: later `cover` operations work below it */
        tree->base = open_base(worker, next_subject(worker));
    } else if (!strcmp(op, "cover")) {
        cover(worker, tree, next_subject(worker));
    } else if (!strcmp(op, "shadow")) {
        shadow(worker, tree, next_subject(worker));
    } else if (!strcmp(op, "overlay")) { /* overlay NAME FLAGS OPTIONS: relative directories, no path of the host */
        const char *name = next_subject(worker), *flags = next_word(worker);
        mount_overlay(worker, name, flags, next_word(worker));
    } else if (!strcmp(op, "root")) { /* root PATH: paths of the image resolve below it */
        int flags = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
        tree->root = (int)need(worker, CALL(openat, AT_FDCWD, next_subject(worker), flags, 0));
    } else {
        return false;
    }
    return true;
}

/* Operations on paths of the image. */
bool inside_operation(struct worker *worker, struct tree *tree, const char *op)
{
    if (!strcmp(op, "put")) { /* put TARGET SLOT FLAGS; `strict`: follow no link */
        const char *target = next_subject(worker);
        int mount = take(worker, next_number(worker));
        put(worker, tree, mount, target, has_flag(next_word(worker), "strict"));
    } else if (!strcmp(op, "move")) { /* move TARGET NAME: the mount that is staged as NAME */
        int at = mount_point(worker, tree->root, next_subject(worker), true, true);
        need(worker, CALL(move_mount, AT_FDCWD, next_word(worker), at, "", MOVE_MOUNT_T_EMPTY_PATH));
        CALL(close, at);
    } else if (!strcmp(op, "mount")) { /* mount TARGET TYPE FLAGS OPTIONS: a new file system */
        const char *target = next_subject(worker), *type = next_word(worker), *flags = next_word(worker);
        put(worker, tree, new_filesystem(worker, type, attribute_flags(flags), next_word(worker)), target, true);
    } else if (!strcmp(op, "directory")) { /* directory PATH MODE: create it if it is missing; an existing one is not changed */
        directory(worker, tree, next_subject(worker));
    } else if (!strcmp(op, "chroot")) { /* chroot: change to the root, so that nothing above it can be named any more */
        need(worker, CALL(fchdir, tree->root));
        need(worker, CALL(chroot, "."));
    } else if (!strcmp(op, "cwd")) {
        change_directory(worker, next_subject(worker));
    } else {
        return stage_operation(worker, tree, op);
    }
    return true;
}
