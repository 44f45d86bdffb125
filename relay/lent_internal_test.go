package relay

import "testing"

// What the kernel tells of descriptors: of a GPU's memory as Linux 6.18 does with an H200's
// driver, and of others.
func TestWhoseDMABuf(t *testing.T) {
	const file = "pos:\t0\nflags:\t02000002\nmnt_id:\t12\nino:\t1\n"
	for _, c := range []struct {
		what, fdinfo string
		want         bool
	}{
		{"a GPU's", file + "size:\t2097152\ncount:\t1\nexp_name:\tnv_dmabuf\n", true},
		{"a GPU's, with a name", file + "size:\t2097152\ncount:\t1\nexp_name:\tnv_dmabuf\nname:\tweights\n", true},
		{"an older driver's", file + "size:\t2097152\ncount:\t1\nexp_name:\tnvidia\n", true},
		{"the host's", file + "size:\t4096\ncount:\t1\nexp_name:\tudmabuf\n", false},
		{"the host's, that is called as a GPU's", file + "size:\t4096\ncount:\t1\nexp_name:\tsystem\nname:\texp_name:\tnv_dmabuf\n", false},
		{"the host's, with a name of two lines", file + "size:\t4096\ncount:\t1\nexp_name:\tudmabuf\nname:\tx\nexp_name:\tnv_dmabuf\n", false},
		{"a file's", file, false},
		{"nothing", "", false},
	} {
		if got := ofGPU([]byte(c.fdinfo)); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}
