package relay

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/wire"
)

// The kernel's fdinfo of descriptors: of a GPU's memory as of Linux 6.18 with an H200's driver, and
// of further files.
func TestDMABufLinkNamesItsOwner(t *testing.T) {
	const file = "pos:\t0\nflags:\t02000002\nmnt_id:\t12\nino:\t1\n"
	for _, c := range []struct {
		what, fdinfo string
		want         bool
	}{
		{"a GPU's", file + "size:\t2097152\ncount:\t1\nexp_name:\tnv_dmabuf\n", true},
		{"a GPU's, with a name", file + "size:\t2097152\ncount:\t1\nexp_name:\tnv_dmabuf\nname:\tweights\n", true},
		{"an older driver's", file + "size:\t2097152\ncount:\t1\nexp_name:\tnvidia\n", true},
		{"the host's", file + "size:\t4096\ncount:\t1\nexp_name:\tudmabuf\n", false},
		{"the host's, that is called as a GPU's",
			file + "size:\t4096\ncount:\t1\nexp_name:\tsystem\nname:\texp_name:\tnv_dmabuf\n", false},
		{"the host's, with a name of two lines",
			file + "size:\t4096\ncount:\t1\nexp_name:\tudmabuf\nname:\tx\nexp_name:\tnv_dmabuf\n", false},
		{"a file's", file, false},
		{"nothing", "", false},
	} {
		if got := ofGPU([]byte(c.fdinfo)); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}

// The link identifies a file that is no DMA-BUF: the check reads nothing that the file's owner can
// delay or enlarge.
func TestDMABufOfClientIsCheckedByItsLink(t *testing.T) {
	const gpu = "pos:\t0\nsize:\t2097152\nexp_name:\tnv_dmabuf\n"
	proc := t.TempDir()
	for i, c := range []struct {
		link, fdinfo string
		want         error
	}{
		{"/dmabuf:", gpu, nil},
		{"/dmabuf:weights", gpu, nil},
		{"/dmabuf:", strings.Repeat("x", maxInfo) + "\n" + gpu, errOtherExporter},
		{"/dmabuf:", "", errOtherExporter},
		// These have no fdinfo here: opening the file would be a different error.
		{"anon_inode:[eventpoll]", "none", &descriptorError{"anon_inode:[eventpoll]"}},
		{"anon_inode:inotify", "none", &descriptorError{"anon_inode:inotify"}},
		{"/memfd:/dmabuf: (deleted)", "none", &descriptorError{"/memfd:/dmabuf: (deleted)"}},
	} {
		link, info := fmt.Sprintf("%s/fd/%d", proc, i), fmt.Sprintf("%s/fdinfo/%d", proc, i)
		err := errors.Join(os.MkdirAll(filepath.Dir(link), 0o755), os.MkdirAll(filepath.Dir(info), 0o755),
			os.Symlink(c.link, link))
		if err == nil && c.fdinfo != "none" {
			err = os.WriteFile(info, []byte(c.fdinfo), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		demandRefusal(t, checkProcDMABuf(proc, i), c.want)
	}
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(epoll)
	inotify, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(inotify)
	demandRefusal(t, checkDMABuf(epoll, false), &descriptorError{"anon_inode:[eventpoll]"})
	demandRefusal(t, checkDMABuf(inotify, false), &descriptorError{"anon_inode:inotify"})
}

// demandRefusal demands a refusal of a descriptor with a cause, or no refusal for nil.
func demandRefusal(t *testing.T, err, want error) {
	t.Helper()
	if !testutil.HasError(err, want) || want != nil && wire.StatusOf(err) != wire.StatusBadDescriptor {
		t.Errorf("the error is %v, not %v", err, want)
	}
}
