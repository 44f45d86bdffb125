package verbs

import (
	"errors"
	"math"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/peerlane/peerlane/internal/testutil"
)

func TestChooseGIDTakesBestUsableGID(t *testing.T) {
	gid := func(index int, kind GIDKind, address string) GID {
		return GID{Index: index, Kind: kind, GID: netip.MustParseAddr(address).As16()}
	}
	// As mlx5 has them: link-local, IPv4, IPv6, each for RoCE v1 and v2.
	table := []GID{
		gid(0, RoCEv1, "fe80::1"), gid(1, RoCEv2, "fe80::1"),
		gid(2, RoCEv1, "192.0.2.1"), gid(3, RoCEv2, "192.0.2.1"),
		gid(4, RoCEv1, "2001:db8::1"), gid(5, RoCEv2, "2001:db8::1"),
		gid(6, RoCEv1, "192.0.2.2"), gid(7, RoCEv2, "192.0.2.2"),
	}
	without := func(indexes ...int) (left []GID) {
		for _, g := range table {
			keep := true
			for _, i := range indexes {
				keep = keep && g.Index != i
			}
			if keep {
				left = append(left, g)
			}
		}
		return left
	}
	infiniband := []GID{gid(0, GIDofIB, "fe80::2"), gid(1, GIDofIB, "2001:db8::2")}
	for _, c := range []struct {
		name string
		of   []GID
		want Choice
		is   int
	}{
		{"RoCE v2 over IPv4", table, Choice{Index: AnyIndex}, 3},
		{"the first IPv4 address belongs to another namespace", without(2, 3), Choice{Index: AnyIndex}, 7},
		{"no IPv4 address", without(2, 3, 6, 7), Choice{Index: AnyIndex}, 5},
		{"link-local addresses alone", without(2, 3, 4, 5, 6, 7), Choice{Index: AnyIndex}, 1},
		{"RoCE v1 alone", without(1, 3, 5, 7), Choice{Index: AnyIndex}, 2},
		{"RoCE v1 preferred", table, Choice{Index: AnyIndex, Kind: RoCEv1}, 2},
		{"IPv6 preferred", table, Choice{Index: AnyIndex, Prefer: iPv6}, 5},
		{"IPv6 preferred, and none there", without(4, 5), Choice{Index: AnyIndex, Prefer: iPv6}, 3},
		{"an index", table, Choice{Index: 4}, 4},
		{"index 0, which is the zero value", table, Choice{}, 0},
		{"InfiniBand", infiniband, Choice{Index: AnyIndex}, 0},
	} {
		if got, err := ChooseGID(c.of, c.want); err != nil || got.Index != c.is {
			t.Errorf("%s: %v, %v; want index %d", c.name, got, err, c.is)
		}
	}
	if _, err := ChooseGID(nil, Choice{Index: AnyIndex}); !errors.Is(err, errNoGID) {
		t.Errorf("of no GID: %v", err)
	}
	if _, err := ChooseGID(without(3), Choice{Index: 3}); !testutil.HasError(err, &emptyGIDError{3, without(3)}) {
		t.Errorf("an index that is empty: %v", err)
	}
}

func TestMTUCodesMatchBytes(t *testing.T) {
	for m, bytes := range map[MTU]int{MTU256: 256, MTU512: 512, MTU1024: 1024, MTU2048: 2048, MTU4096: 4096, 0: 0, 6: 0} {
		if m.Bytes() != bytes {
			t.Errorf("MTU %d: %d bytes, want %d", m, m.Bytes(), bytes)
		}
	}
	for bytes, want := range map[int]MTU{256: MTU256, 1023: MTU512, 1400: MTU1024, 4096: MTU4096, 9000: MTU4096} {
		if m, ok := MTUOf(bytes); !ok || m != want {
			t.Errorf("of %d bytes: %d, %v; want %d", bytes, m, ok, want)
		}
	}
	if m, ok := MTUOf(255); ok {
		t.Errorf("of 255 bytes: %d", m)
	}
}

// Rates as ibstat rounds them.
func TestPortRatesMatchIbstat(t *testing.T) {
	for _, c := range []struct {
		width, speed uint8
		want         float64
	}{
		{2, 128, 400}, {2, 64, 200}, {2, 32, 100}, {2, 16, 56}, {2, 4, 40}, {1, 1, 2.5}, {16, 128, 200}, {2, 0, 0},
		{3, 32, 0},
	} {
		rate := laneCount[c.width] * laneRate[c.speed]
		if math.Abs(rate-c.want) > c.want*0.07 {
			t.Errorf("width %d, speed %d: %v Gb/s, want %v", c.width, c.speed, rate, c.want)
		}
	}
}

func TestErrorsOfVerbsNameTheRemedy(t *testing.T) {
	for _, c := range []struct {
		err  error
		want []string
	}{
		{&Error{Call: "ibv_reg_mr", On: "mlx5_0, 4096 bytes", Errno: syscall.ENOMEM},
			[]string{"ibv_reg_mr (mlx5_0, 4096 bytes): cannot allocate memory (ENOMEM)", "ulimit -l"}},
		{&Error{Call: "ibv_open_device", On: "mlx5_0", Errno: syscall.EACCES}, []string{"/dev/infiniband"}},
		{&Error{Call: "ibv_reg_dmabuf_mr", Errno: syscall.EOPNOTSUPP}, []string{"EOPNOTSUPP", "5.12"}},
		{&loadError{Library: defaultLibrary, Reason: "no such file"}, []string{"libibverbs1", "no such file"}},
		{&loadError{Library: managerLibrary, Reason: "no such file"}, []string{"librdmacm1"}},
		{&loadError{Library: defaultLibrary, Missing: "ibv_reg_mr_iova2"}, []string{"lacks ibv_reg_mr_iova2",
			"rdma-core 32"}},
		{(&Completion{Status: ReceiverRetryExceeded, Pair: 17, Vendor: 0x87}).Err(),
			[]string{"queue pair 17: RNR retry counter exceeded (completion status 13, vendor's code 0x87): the other " +
				"side has posted no receive"}},
		{(&Completion{Status: LocalProtectionError}).Err(), []string{"local protection error", "is not registered"}},
		{(&Completion{Status: 99, Pair: 17}).Err(), []string{"completion status 99"}},
	} {
		for _, want := range c.want {
			if !strings.Contains(c.err.Error(), want) {
				t.Errorf("%q does not say %q", c.err, want)
			}
		}
	}
	if err := (&Completion{}).Err(); err != nil {
		t.Errorf("of success: %v", err)
	}
}

func TestMissingLibraryIsNamed(t *testing.T) {
	var e *loadError
	if _, err := OpenLibrary("/nowhere/libibverbs.so.1"); !errors.As(err, &e) || e.Reason == "" {
		t.Errorf("%v", err)
	}
	// libc is there, and lacks all.
	if _, err := OpenLibrary("libc.so.6"); !errors.As(err, &e) || e.Missing != "ibv_get_device_list" {
		t.Errorf("%v", err)
	}
}
