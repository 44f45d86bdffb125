package registration_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/sim"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/registration"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

const mib = 1 << 20

// gpus are two, the first with a context of this process.
var (
	driver *cuda.Driver
	asks   *device.Device
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	dir, err := os.MkdirTemp("", "peerlane-registration-*")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := sim.Use(dir, []sim.Device{
		{Index: 0, Minor: 0, UUID: "GPU-5eed0000-0000-4000-8000-000000000000", BusID: "0000:17:00.0", Memory: 256 * mib,
			Name: "Simulated GPU"},
		{Index: 1, Minor: 1, UUID: "GPU-5eed0000-0000-4000-8000-000000000001", BusID: "0000:18:00.0", Memory: 256 * mib,
			Name: "Simulated GPU"},
	}); err != nil {
		return 0, err
	}
	if driver, err = cuda.Open(); err != nil {
		return 0, err
	}
	if asks, err = device.Open(driver, "0000:17:00.0"); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, asks.Close()) }()
	return m.Run(), nil
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// nics opens devices of a host of software devices, with a domain on each.
func nics(t testing.TB, devices ...softdevice.Device) (softdevice.Host, []registration.NIC) {
	t.Helper()
	h, err := softdevice.New(t.TempDir(), devices...)
	check(t, err)
	l, err := verbs.OpenLibrary(h.Library())
	check(t, err)
	var list []registration.NIC
	for _, d := range devices {
		c, err := l.OpenDevice(d.Name)
		check(t, err)
		domain, err := c.NewDomain()
		check(t, err)
		// A region that is left keeps both open.
		t.Cleanup(func() { check(t, errors.Join(domain.Close(), c.Close())) })
		list = append(list, registration.NIC{Name: d.Name, Domain: domain})
	}
	return h, list
}

// incapable reports some kinds of memory as inaccessible to NICs.
type incapable struct {
	registration.Allocator
	kinds map[registration.Kind]bool
	last  registration.Kind
}

func (a *incapable) Make(kind registration.Kind, bytes uint64) (registration.Memory, error) {
	a.last = kind
	return a.Allocator.Make(kind, bytes)
}

func (a *incapable) Capable(m registration.Memory) (bool, error) {
	if a.kinds[a.last] {
		return false, nil
	}
	return a.Allocator.Capable(m)
}

const access = verbs.LocalWrite | verbs.RemoteWrite

func TestFirstWorkingRegistrationIsUsed(t *testing.T) {
	own := registration.GPU{Asks: asks, On: 0}
	other := registration.GPU{Asks: asks, On: 1}
	yes := softdevice.Device{Name: "yes"}
	peermem := softdevice.Device{Name: "peermem", NoDMABuf: true, Peermem: "yes"}
	old := softdevice.Device{Name: "old", NoDMABuf: true, Peermem: "alloc"}
	none := softdevice.Device{Name: "none", NoDMABuf: true}
	for _, c := range []struct {
		name    string
		from    registration.Allocator
		devices []softdevice.Device
		script  string
		way     registration.Way
		steps   []string // each begins so
	}{
		{"DMA-BUF", own, []softdevice.Device{yes}, "", registration.DMABuf, []string{
			"yes: DMA-BUF, memory of cuMemCreate",
		}},
		{"DMA-BUF, on a GPU without a context", other, []softdevice.Device{yes}, "", registration.DMABuf, []string{
			"yes: DMA-BUF, memory of cuMemCreate",
		}},
		{"nvidia-peermem", own, []softdevice.Device{peermem}, "", registration.Peermem, []string{
			"peermem: DMA-BUF, memory of cuMemCreate: ibv_reg_dmabuf_mr (peermem, 2097152 bytes",
			"peermem: nvidia-peermem, memory of cuMemCreate",
		}},
		{"nvidia-peermem that knows cuMemAlloc alone", own, []softdevice.Device{old}, "", registration.Peermem, []string{
			"old: DMA-BUF, memory of cuMemCreate: ibv_reg_dmabuf_mr",
			"old: nvidia-peermem, memory of cuMemCreate: ibv_reg_mr (old, 2097152 bytes",
			"old: DMA-BUF, memory of cuMemAlloc: ",
			"old: nvidia-peermem, memory of cuMemAlloc",
		}},
		{"neither", own, []softdevice.Device{none}, "", registration.Bounce, []string{
			"none: DMA-BUF, memory of cuMemCreate: ibv_reg_dmabuf_mr",
			"none: nvidia-peermem, memory of cuMemCreate: ibv_reg_mr",
			"none: DMA-BUF, memory of cuMemAlloc: ",
			"none: nvidia-peermem, memory of cuMemAlloc: ibv_reg_mr",
			"through host memory (bounce)",
		}},
		{"cuMemAlloc would do, on a GPU where no context may be", other, []softdevice.Device{old}, "", registration.Bounce,
			[]string{
				"old: DMA-BUF, memory of cuMemCreate: ",
				"old: nvidia-peermem, memory of cuMemCreate: ",
				"all NICs: nvidia-peermem, memory of cuMemAlloc: memory of cuMemAlloc on GPU 1 needs a context there",
				"through host memory (bounce)",
			}},
		// No other memory is smaller.
		{"locked memory is limited", own, []softdevice.Device{peermem}, "ibv_reg_mr errno=12", registration.Bounce, []string{
			"peermem: DMA-BUF, memory of cuMemCreate: ",
			"peermem: nvidia-peermem, memory of cuMemCreate: ibv_reg_mr",
			"through host memory (bounce)",
		}},
		{"each NIC has its own way", own, []softdevice.Device{yes, peermem}, "", registration.Peermem, []string{
			"yes: DMA-BUF, memory of cuMemCreate",
			"peermem: DMA-BUF, memory of cuMemCreate: ",
			"peermem: nvidia-peermem, memory of cuMemCreate",
		}},
		{"and all have the same memory", own, []softdevice.Device{peermem, old}, "", registration.Peermem, []string{
			"peermem: DMA-BUF, memory of cuMemCreate: ",
			"peermem: nvidia-peermem, memory of cuMemCreate",
			"old: DMA-BUF, memory of cuMemCreate: ",
			"old: nvidia-peermem, memory of cuMemCreate: ",
			"peermem: DMA-BUF, memory of cuMemAlloc: ",
			"peermem: nvidia-peermem, memory of cuMemAlloc",
			"old: DMA-BUF, memory of cuMemAlloc: ",
			"old: nvidia-peermem, memory of cuMemAlloc",
		}},
		{"the driver says no of cuMemCreate",
			&incapable{Allocator: own, kinds: map[registration.Kind]bool{registration.VMM: true}},
			[]softdevice.Device{peermem}, "", registration.Peermem, []string{
				"peermem: DMA-BUF, memory of cuMemCreate: the CUDA driver lets no NIC have this memory",
				"peermem: DMA-BUF, memory of cuMemAlloc: ",
				"peermem: nvidia-peermem, memory of cuMemAlloc",
			}},
		{"the driver says no of all", &incapable{Allocator: own, kinds: map[registration.Kind]bool{registration.VMM: true,
			registration.Allocated: true}}, []softdevice.Device{yes}, "", registration.Bounce, []string{
			"yes: DMA-BUF, memory of cuMemCreate: the CUDA driver lets no NIC",
			"yes: DMA-BUF, memory of cuMemAlloc: the CUDA driver lets no NIC",
			"through host memory (bounce)",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h, list := nics(t, c.devices...)
			check(t, h.Script(c.script))
			before := free(t)
			r, err := madeBy(c.from, mib, list, access)
			check(t, err)
			var steps []string
			for i, s := range r.Steps {
				text := s.String()
				if i < len(c.steps) && s.Err != nil && strings.HasPrefix(text, c.steps[i]) {
					text = c.steps[i]
				}
				steps = append(steps, text)
			}
			if diff := cmp.Diff(c.steps, steps); diff != "" || r.Way() != c.way {
				t.Errorf("by %v, and not %v; steps (-want +got):\n%s", r.Way(), c.way, diff)
			}
			if c.way != registration.Bounce {
				if len(r.Regions) != len(list) || r.Memory.Size() < mib {
					t.Errorf("%d regions of %d bytes", len(r.Regions), r.Memory.Size())
				}
				registeredWhole(t, h, r)
			}
			check(t, r.Close())
			if after := free(t); after != before {
				t.Errorf("%d bytes of the GPUs' memory are free, and were %d", after, before)
			}
		})
	}
}

// registeredWhole checks the registrations of the NICs.
func registeredWhole(t *testing.T, h softdevice.Host, r *registration.Registered) {
	t.Helper()
	calls, err := h.Calls("ibv_reg_dmabuf_mr", "ibv_reg_mr")
	check(t, err)
	worked := 0
	for _, c := range calls {
		if c.Arguments["="] != "0" {
			continue
		}
		address := fmt.Sprintf("%#x", r.Memory.Address())
		if c.Arguments["iova"] != address || c.Arguments["length"] != fmt.Sprint(r.Memory.Size()) ||
			c.Arguments["access"] != "0x3" {
			continue // of memory that was given back
		}
		worked++
		if c.Name == "ibv_reg_dmabuf_mr" && c.Arguments["offset"] != "0" ||
			c.Name == "ibv_reg_mr" && c.Arguments["memory"] != address {
			t.Errorf("%s of %v", c.Name, c.Arguments)
		}
	}
	if worked != len(r.Regions) {
		t.Errorf("%d registrations of the memory, want %d: %v", worked, len(r.Regions), calls)
	}
}

// free is the memory that this process knows to be free, of the GPU with the context.
// madeBy makes memory with a current context, which the driver needs for a DMA-BUF.
func madeBy(
	from registration.Allocator,
	bytes uint64,
	nics []registration.NIC,
	access verbs.Access,
) (r *registration.Registered, err error) {
	err = asks.On(func() (err error) {
		r, err = registration.Make(from, bytes, nics, access)
		return err
	})
	return r, err
}

func free(t *testing.T) (bytes uint64) {
	t.Helper()
	check(t, asks.On(func() (err error) {
		bytes, _, err = driver.MemGetInfo()
		return err
	}))
	return bytes
}

// Without memory there is nothing to register, and bounce would hide that.
func TestRegistrationWithoutMemoryFails(t *testing.T) {
	_, list := nics(t, softdevice.Device{Name: "yes"})
	if r, err := madeBy(registration.GPU{Asks: asks, On: 0}, 1024*mib, list, access); !errors.Is(
		err,
		cuda.ErrOutOfMemory,
	) {
		t.Errorf("%v, %v", r, err)
	}
}

// Memory registered by nvidia-peermem must outlive the registration.
func TestMemoryOutlivesItsRegistration(t *testing.T) {
	h, list := nics(t, softdevice.Device{Name: "old", NoDMABuf: true, Peermem: "alloc"})
	r, err := madeBy(registration.GPU{Asks: asks, On: 0}, mib, list, access)
	check(t, err)
	kept := &watched{Memory: r.Memory, closing: func() {
		calls, err := h.Calls("ibv_dereg_mr")
		check(t, err)
		if len(calls) != 1 {
			t.Errorf("the memory is freed with %d of its registrations ended", len(calls))
		}
	}}
	r.Memory = kept
	check(t, r.Close())
	if !kept.closed {
		t.Error("the memory is not freed")
	}
}

type watched struct {
	registration.Memory
	closing func()
	closed  bool
}

func (w *watched) Close() error {
	w.closing()
	w.closed = true
	return w.Memory.Close()
}

func TestClientMemoryUsesItsOwnDescriptorAlone(t *testing.T) {
	h, list := nics(t, softdevice.Device{Name: "yes"}, softdevice.Device{Name: "peermem", NoDMABuf: true, Peermem: "yes"})
	m, err := device.Create(driver, 0, mib, cuda.Access{Device: 0, Write: true})
	check(t, err)
	defer func() { check(t, m.Close()) }()
	var fd int
	err = asks.On(func() (err error) { fd, err = m.DMABuf(); return err })
	check(t, err)
	defer func() { check(t, syscall.Close(fd)) }()
	region, err := registration.Client(fd, 4096, 8192, 0x10000, list[0], access)
	check(t, err)
	calls, err := h.Calls("ibv_reg_dmabuf_mr")
	check(t, err)
	for name, want := range map[string]string{"fd": fmt.Sprint(fd), "offset": "0x1000", "length": "8192",
		"iova": "0x10000"} {
		if got := calls[0].Arguments[name]; got != want {
			t.Errorf("%s %s, want %s", name, got, want)
		}
	}
	check(t, region.Close())
	if _, err := registration.Client(fd, 0, 4096, 0, list[1], access); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("of a NIC without DMA-BUF: %v", err)
	}
	if calls, err = h.Calls("ibv_reg_mr"); err != nil || len(calls) > 0 {
		t.Errorf("other memory was tried: %v, %v", calls, err)
	}
}

// After any DMA-BUF error of a kernel, registration tries the next method, and keeps the error.
func TestRegistrationErrorTriesNextMethod(t *testing.T) {
	h, list := nics(t, softdevice.Device{Name: "n", Peermem: "yes"})
	for _, refused := range []syscall.Errno{
		syscall.EPERM, syscall.EIO, syscall.EBADF, syscall.EAGAIN, syscall.ENOMEM, syscall.EACCES, syscall.EFAULT,
		syscall.EBUSY, syscall.EINVAL,
		syscall.ENOTTY, syscall.ENOSPC, syscall.ENOSYS, syscall.EPROTONOSUPPORT, syscall.EOPNOTSUPP, syscall.ETIMEDOUT,
	} {
		check(t, h.Script(fmt.Sprintf("ibv_reg_dmabuf_mr errno=%d", int(refused))))
		r, err := madeBy(registration.GPU{Asks: asks, On: 0}, mib, list, access)
		check(t, err)
		if r.Way() != registration.Peermem || r.Way().Word() != "peermem" || len(r.Steps) != 2 ||
			!errors.Is(r.Steps[0].Err, refused) {
			t.Errorf("%v: %v, by %v", refused, r, r.Way())
		}
		check(t, r.Close())
		// And where that is refused too, host memory, unless other memory may do.
		check(
			t,
			h.Script(fmt.Sprintf("ibv_reg_dmabuf_mr errno=%d", int(refused)), fmt.Sprintf("ibv_reg_mr errno=%d", int(refused))),
		)
		r, err = madeBy(registration.GPU{Asks: asks, On: 0}, mib, list, access)
		check(t, err)
		want := 3
		if refused == syscall.EFAULT {
			want = 5
		}
		if r.Way() != registration.Bounce || r.Way().Word() != "bounce" || len(r.Steps) != want {
			t.Errorf("%v of both: %v, by %v", refused, r, r.Way())
		}
		check(t, r.Close())
	}
}

// A NIC's Data Direct function registers memory first, and the usual path after a failure.
func TestDataDirectRegistersBeforeDMABuf(t *testing.T) {
	for _, c := range []struct {
		name   string
		script string
		want   []string // results of mlx5dv_reg_dmabuf_mr
	}{
		{"that works", "", []string{"0"}},
		{"that is refused", "mlx5dv_reg_dmabuf_mr errno=22", []string{"22"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h, list := nics(t, softdevice.Device{Name: "direct", DataDirect: true}, softdevice.Device{Name: "plain"})
			check(t, h.Script(c.script))
			list[0].DataDirect = true
			r, err := madeBy(registration.GPU{Asks: asks, On: 0}, 1<<20, list, access)
			check(t, err)
			defer func() { check(t, r.Close()) }()
			if r.Way() != registration.DMABuf || len(r.Regions) != 2 {
				t.Errorf("registered by %v: %v", r.Way(), r)
			}
			calls, err := h.Calls("mlx5dv_reg_dmabuf_mr")
			check(t, err)
			var got []string
			for _, call := range calls {
				if call.Arguments["device"] != "direct" {
					t.Errorf("%s has no Data Direct function, and registers by one", call.Arguments["device"])
				}
				got = append(got, call.Arguments["="])
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("results of mlx5dv_reg_dmabuf_mr (-want +got)\n%s", diff)
			}
		})
	}
}
