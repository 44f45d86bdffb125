//go:build packages

package packages

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// policy returns the packaged module, linked with Debian's base policy and a replacement for
// container-selinux, in binary form: for searches only.
func policy(t *testing.T) string {
	t.Helper()
	linked.once.Do(func() {
		dir, err := os.MkdirTemp("", "peerlane-policy-*")
		check(t, err)
		linked.dir = dir
		stand := filepath.Join(dir, "container")
		run(t, "checkmodule", "-M", "-m", "-o", stand+".mod", source+"/packaging/selinux/container.te")
		run(t, "semodule_package", "-o", stand+".pp", "-m", stand+".mod")
		run(t, "sh", "-c", `bzip2 -dc /usr/share/selinux/default/base.pp.bz2 >"$1"`, "sh", filepath.Join(dir, "base.pp"))
		run(t, "semodule_link", "-o", filepath.Join(dir, "linked"), filepath.Join(dir, "base.pp"), stand+".pp",
			filepath.Join(unpacked(t, "peerlane-selinux", "all"), "usr/share/selinux/packages/peerlane.pp"))
		run(t, "semodule_expand", filepath.Join(dir, "linked"), filepath.Join(dir, "policy"))
	})
	if linked.dir == "" {
		t.Fatal("there is no policy")
	}
	return filepath.Join(linked.dir, "policy")
}

var linked struct {
	once sync.Once
	dir  string
}

func TestMain(m *testing.M) {
	status := m.Run()
	if linked.dir != "" {
		os.RemoveAll(linked.dir)
	}
	os.Exit(status)
}

// allowed reports whether a domain has a permission, directly or by an attribute.
func allowed(t *testing.T, domain, object, class, permission string) bool {
	t.Helper()
	out := run(t, "sesearch", "--allow", "-s", domain, "-t", object, "-c", class, "-p", permission, policy(t))
	return strings.Contains(out, "allow ")
}

// Domains of the policy.
const (
	relay     = "peerlane_relay_t"
	container = "container_t"
	engine    = "container_runtime_t"
)

func TestPolicyAllowsNeededAccess(t *testing.T) {
	for _, p := range [][4]string{
		{container, "peerlane_socket_t", "dir", "search"},
		{container, "peerlane_anchor_t", "dir", "search"},
		{container, "peerlane_socket_t", "sock_file", "write"},
		{container, "peerlane_socket_t", "file", "read"}, // NCCL's topology file
		{engine, "peerlane_socket_t", "file", "rename"},
		{container, engine, "unix_stream_socket", "connectto"}, // the hook listens
		{container, relay, "unix_stream_socket", "connectto"},
		{container, relay, "fd", "use"},
		{container, "peerlane_memfd_t", "file", "map"},
		{container, "peerlane_memfd_t", "file", "write"},
		{container, "peerlane_lib_t", "file", "map"},
		{container, "peerlane_lib_t", "file", "execute"},
		{relay, container, "fd", "use"},
		{relay, container, "unix_stream_socket", "read"},
		{relay, engine, "fd", "use"},
		{relay, engine, "unix_stream_socket", "accept"},
		{relay, "peerlane_memfd_t", "file", "create"},
		{relay, "device_t", "chr_file", "ioctl"},
		{engine, "peerlane_socket_t", "sock_file", "create"},
		{engine, relay, "process2", "nnp_transition"},
		{"init_t", relay, "process", "transition"},
	} {
		if !allowed(t, p[0], p[1], p[2], p[3]) {
			t.Errorf("%s may not %s %s:%s", p[0], p[3], p[1], p[2])
		}
	}
}

func TestPolicyRefusesOtherAccess(t *testing.T) {
	for _, p := range [][4]string{
		{container, "peerlane_socket_t", "sock_file", "unlink"},
		{container, "peerlane_socket_t", "sock_file", "create"},
		{container, "peerlane_socket_t", "dir", "add_name"},
		{container, "peerlane_socket_t", "file", "write"},
		{container, "peerlane_lib_t", "file", "write"},
		{container, "peerlane_var_lib_t", "dir", "search"},
		{container, "peerlane_runtime_t", "dir", "search"},
		{container, "peerlane_runtime_t", "sock_file", "write"}, // the relays' sockets, and the launcher's socket
		{container, "peerlane_memfd_t", "file", "execute"},
		{container, "peerlane_relay_exec_t", "file", "execute"},
		{container, relay, "process", "ptrace"},
		{container, relay, "process", "sigkill"},
		{relay, container, "process", "ptrace"},
		{relay, container, "process", "sigkill"},
		{relay, "peerlane_var_lib_t", "file", "write"},
		{relay, "peerlane_socket_t", "sock_file", "unlink"},
		{relay, "peerlane_lib_t", "file", "write"},
		{relay, "etc_t", "file", "write"},
		{relay, "shadow_t", "file", "read"},
		{relay, "bin_t", "file", "execute_no_trans"},
		{relay, relay, "capability", "sys_admin"},
		{relay, relay, "tcp_socket", "create"},
	} {
		if allowed(t, p[0], p[1], p[2], p[3]) {
			t.Errorf("%s may %s %s:%s", p[0], p[3], p[1], p[2])
		}
	}
}

func TestPolicyTransitionsToRelayDomain(t *testing.T) {
	for _, from := range []string{"init_t", engine} {
		out := run(t, "sesearch", "--type_trans", "-s", from, "-t", "peerlane_relay_exec_t", "-c", "process", policy(t))
		if !strings.Contains(out, "process "+relay+";") {
			t.Errorf("%s keeps its domain when it executes the relay: %q", from, out)
		}
	}
	// Containers may search the directories that the hook creates in /run/peerlane/sockets, but not
	// the directories in /run/peerlane.
	dirs := run(t, "sesearch", "--type_trans", "-s", engine, "-c", "dir", policy(t))
	for _, rule := range []string{
		"peerlane_runtime_t:dir peerlane_socket_t;",
		"peerlane_runtime_t:dir peerlane_runtime_t sockets;",
		"peerlane_runtime_t:dir peerlane_runtime_t peers;",
		"peerlane_var_lib_t:dir peerlane_anchor_t anchor;",
	} {
		if !strings.Contains(dirs, "type_transition "+engine+" "+rule) {
			t.Errorf("of the hook's directories nothing says %s\n%s", rule, dirs)
		}
	}
	if out := run(t, "sesearch", "--type_trans", "-s", relay, "-t", "tmpfs_t", "-c", "file",
		policy(t)); !strings.Contains(out, "file peerlane_memfd_t;") {
		t.Errorf("the relay's memfds have another type: %q", out)
	}
}
