/* SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"
#include "trust.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static char resolved[PATH_MAX];
static const char *why;

static bool trusted(const char *path)
{
    why = NULL;
    bool good = trust_resolve(path, getuid(), resolved, &why);
    CHECK(good || why != NULL);
    return good;
}

static void touch(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0755);
    CHECK(fd >= 0);
    close(fd);
}

int main(void)
{
    char base[] = "/tmp/kernel-capture-trust-XXXXXX";
    char path[4][PATH_MAX];
    CHECK(mkdtemp(base) != NULL);
    snprintf(path[0], PATH_MAX, "%s/inner", base);
    snprintf(path[1], PATH_MAX, "%s/inner/criu", base);
    snprintf(path[2], PATH_MAX, "%s/link", base);
    snprintf(path[3], PATH_MAX, "%s/dangling", base);
    CHECK(mkdir(path[0], 0755) == 0);
    touch(path[1]);
    CHECK(symlink("inner/criu", path[2]) == 0 && symlink("nowhere", path[3]) == 0);

    CHECK(trusted("/usr/bin/env"));
    CHECK(trusted(path[1])); /* /tmp may be written by all, but is sticky */
    CHECK_STRING(resolved, path[1]);
    CHECK(trusted(path[2])); /* a link counts as what it leads to */
    CHECK_STRING(resolved, path[1]);
    CHECK(!trusted(path[3]) && !trusted("/no/such/file") && !trusted("criu") && !trusted(""));

    CHECK(chmod(path[0], 0775) == 0 && !trusted(path[1])); /* the group could swap the file */
    CHECK(chmod(path[0], 0757) == 0 && !trusted(path[1]) && !trusted(path[2]));
    CHECK(chmod(path[0], 0755) == 0 && trusted(path[1]));
    CHECK(chmod(path[1], 0777) == 0 && !trusted(path[1])); /* anybody could change it */
    CHECK(chmod(path[1], 01777) == 0 && !trusted(path[1])); /* sticky means nothing for a file */
    CHECK(chmod(path[1], 0755) == 0 && trusted(path[1]));
    if (getuid() == 0) {
        CHECK(chown(path[1], 65534, 65534) == 0 && !trusted(path[1]));
        CHECK(trust_resolve(path[1], 65534, resolved, &why));
        CHECK(!trust_resolve(path[1], 0, resolved, &why));
        CHECK(chown(path[1], 0, 0) == 0 && chown(path[0], 65534, 0) == 0 && !trusted(path[1]));
    } else {
        CHECK(!trust_resolve(path[1], 0, resolved, &why));
    }
    CHECK(unlink(path[1]) == 0 && unlink(path[2]) == 0 && unlink(path[3]) == 0);
    CHECK(rmdir(path[0]) == 0 && rmdir(base) == 0);
    return 0;
}
