/* SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"
#include "criu.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io.h"

static void versions(void)
{
    char version[16];
    bool enough;
    CHECK(criu_parse_version("Version: 4.2.1\nGitID: x\n", version, sizeof(version), &enough));
    CHECK_STRING(version, "4.2.1");
    CHECK(enough);
    CHECK(criu_parse_version("Version: 4.1.1\n", version, sizeof(version), &enough) && !enough);
    CHECK(criu_parse_version("Version: 3.17.1\n", version, sizeof(version), &enough) && !enough);
    CHECK(criu_parse_version("Version: 4.10\n", version, sizeof(version), &enough) && enough);
    CHECK(criu_parse_version("Version: 5", version, sizeof(version), &enough) && enough);
    CHECK(!criu_parse_version("", version, sizeof(version), &enough));
    CHECK(!criu_parse_version("Version: \n", version, sizeof(version), &enough));
    CHECK(!criu_parse_version("Version: 4.2.1.1.1.1.1.1.1.1.1.1", version, sizeof(version), &enough));
    uint64_t state = 2463534242;
    for (int i = 0; i < 20000; i++) {
        char *text = check_mangle("x\nVersion: 4.2.1\nGitID: v4.2.1\n", &state);
        if (criu_parse_version(text, version, sizeof(version), &enough))
            CHECK(strlen(version) < sizeof(version));
        free(text);
    }
}

static void image_folders(void)
{
    char base[] = "/tmp/kernel-capture-criu-XXXXXX";
    char link_path[64];
    struct kc_result result = {0};
    CHECK(mkdtemp(base) != NULL);
    snprintf(link_path, sizeof(link_path), "%s/link", base);
    int fd = criu_open_images(base, &result);
    CHECK(fd >= 0 && result.reason == KC_OK);
    CHECK(symlink(".", link_path) == 0);
    CHECK(criu_open_images(link_path, &result) == -1 && result.reason == KC_USAGE);
    result = (struct kc_result){0};
    CHECK(chmod(base, 0770) == 0);
    CHECK(criu_open_images(base, &result) == -1 && result.reason == KC_USAGE);
    CHECK(chmod(base, 0700) == 0);

    /* The list of stopped tasks: written only when there are some, read with care. */
    struct tree_task tasks[] = {{10, 1, 'S'}, {11, 2, 'T'}, {12, 3, 'R'}, {13, 4, 'T'}};
    struct tree tree = {.tasks = tasks, .count = 1, .capacity = 4};
    CHECK(criu_write_stopped(fd, &tree) && faccessat(fd, "stopped-tasks", F_OK, 0) != 0);
    tree.count = 4;
    CHECK(criu_write_stopped(fd, &tree));
    for (size_t i = 0; i < 4; i++)
        tasks[i].state = 'T';
    criu_mark_stopped(fd, &tree);
    CHECK(tasks[0].state == 'R' && tasks[1].state == 'T');
    CHECK(tasks[2].state == 'R' && tasks[3].state == 'T');
    int file = openat(fd, "stopped-tasks", O_WRONLY | O_TRUNC);
    CHECK(file >= 0 && io_write_all(file, "11 rubbish", 10));
    close(file);
    criu_mark_stopped(fd, &tree);
    CHECK(tasks[1].state == 'R');

    /* No log, no room to speak of: an event all the same. */
    CHECK(!criu_out_of_space(fd, "dump.log"));
    file = openat(fd, "dump.log", O_WRONLY | O_CREAT | O_EXCL, 0600);
    const char said[] = "Error (x): write: No space left on device\nError \xff \0 nul\n";
    CHECK(file >= 0 && io_write_all(file, said, sizeof(said) - 1));
    for (int i = 0; i < 3000; i++)
        CHECK(io_write_all(file, "Error: nothing in particular, many times over\n", 46));
    CHECK(criu_out_of_space(fd, "dump.log"));
    close(file);
    criu_error_event(&result, fd, "dump.log");
    criu_error_event(&result, -1, NULL);
    CHECK(unlinkat(fd, "dump.log", 0) == 0 && unlinkat(fd, "stopped-tasks", 0) == 0);
    CHECK(unlink(link_path) == 0 && rmdir(base) == 0);
    close(fd);
}

static void arguments(void)
{
    struct criu_args args = {.count = 0};
    criu_common_args(&args, "dump", "log");
    CHECK(!args.overflow && args.argv[args.count] == NULL);
    for (int i = 0; i < 100; i++)
        criu_arg(&args, "x");
    CHECK(args.overflow && args.count < CRIU_ARGS_MAX && args.argv[args.count] == NULL);
}

int main(void)
{
    versions();
    image_folders();
    arguments();
    return 0;
}
