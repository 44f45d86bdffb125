package hook_test

import (
	"cmp"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/staging"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
)

// tenant is a container whose relay sends the claims of the test.
type tenant struct {
	host
	id, generation string
	claims         uint64
	// memory is the GPU memory that the relay states; 0 means 8 GiB, the true size.
	memory uint64
}

// tenant starts a container on host h. The relay of the container has a separate TEST_DIR.
func (h host) tenant(t *testing.T, id string) *tenant {
	t.Helper()
	return h.tenantWith(t, id, lane(3))
}

func (h host) tenantWith(t *testing.T, id string, lane launch.Lane) *tenant {
	t.Helper()
	own := host{h.layout, t.TempDir()}
	if err := os.Chmod(own.dir, 0o777); err != nil { // relays are not root, and write reports to this directory
		t.Fatal(err)
	}
	r := own.request(id, startProcess(t).Process.Pid, "", lane)
	r.Config.Relay.Slots, r.Config.Relay.SlotSize = 512, 4*mib // 4 GiB in both directions
	g, err := hook.Launch(h.layout, r)
	if err != nil {
		t.Fatal(err)
	}
	own.state(t, g.ID, generation.StateReady)
	return &tenant{host: own, id: id, generation: g.ID}
}

const mib = 1 << 20

// claim makes the relay claim staging on the server GPU of the lanes, which has 8 GiB.
func (c *tenant) claim(t *testing.T, bytes uint64) launch.Admission {
	t.Helper()
	return c.claimOn(t, lane(3).Servers[0].BusID, bytes)
}

func (c *tenant) claimOn(t *testing.T, gpu string, bytes uint64) launch.Admission {
	t.Helper()
	c.ask(t, gpu, bytes)
	return c.answer(t)
}

func (c *tenant) ask(t *testing.T, gpu string, bytes uint64) {
	t.Helper()
	c.claims++
	text, err := json.Marshal(launch.Claim{Claim: c.claims, GPU: gpu, Bytes: bytes, Memory: cmp.Or(c.memory, 8<<30)})
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(c.dir, "claim")
	if err := errors.Join(os.WriteFile(name+".new", text, 0o644), os.Rename(name+".new", name)); err != nil {
		t.Fatal(err)
	}
}

func (c *tenant) answer(t *testing.T) launch.Admission {
	t.Helper()
	var answer launch.Admission
	testutil.Succeeds(t, "an admission", func() error {
		for _, a := range reports[launch.Admission](t, c.dir, "admission") {
			if a.Claim == c.claims {
				answer = a
				return nil
			}
		}
		return errors.New("no answer")
	})
	return answer
}

func (h host) configure(t *testing.T, change func(*config.Config)) {
	t.Helper()
	c := config.Default()
	change(&c)
	if err := errors.Join(os.MkdirAll(h.layout.Config(), 0o755), c.Write(h.layout.ConfigFile())); err != nil {
		t.Fatal(err)
	}
}

func limited(bytes config.Size) func(*config.Config) {
	return func(c *config.Config) { c.Staging.Limit = &bytes }
}

func admitted(t *testing.T, a launch.Admission) {
	t.Helper()
	if !a.OK {
		t.Fatalf("not admitted: %s", a.Error)
	}
}

func notAdmitted(t *testing.T, a launch.Admission, free uint64, want ...string) {
	t.Helper()
	if a.OK {
		t.Fatal("admitted")
	}
	if a.Free != free {
		t.Errorf("%d MiB are free, want %d", a.Free/mib, free/mib)
	}
	for _, s := range want {
		if !strings.Contains(a.Error, s) {
			t.Errorf("admission lacks %q: %s", s, a.Error)
		}
	}
}

// staged requires that the relays together stage want bytes on the server GPU.
func (h host) staged(t *testing.T, want uint64) {
	t.Helper()
	got, err := staging.StagingByGPU(h.layout)
	if err != nil {
		t.Fatal(err)
	}
	if gpu := lane(3).Servers[0].BusID; len(got) != 1 || got[gpu] != want {
		t.Errorf("relays have %v, want %d of %s only", got, want, gpu)
	}
}

func TestStagingIsAdmittedPerHost(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.configure(t, limited(1<<30))
	a, b, c := h.tenant(t, "trainer"), h.tenant(t, "server"), h.tenant(t, "third")
	admitted(t, a.claim(t, 512*mib))
	admitted(t, b.claim(t, 256*mib))
	admitted(t, b.claim(t, 384*mib)) // the new total of the relay
	refused := c.claim(t, 256*mib)
	notAdmitted(
		t,
		refused,
		128*mib,
		"256 MiB of staging requested on GPU 100 (0000:74:00.0)",
		"1.0 GiB (staging.limit)",
		"others have 896 MiB: container trainer 512 MiB, container server 384 MiB",
	)
	admitted(t, c.claim(t, refused.Free))
	h.staged(t, 1<<30)
	notAdmitted(t, c.claim(t, refused.Free+1), 128*mib)
	notAdmitted(t, c.claimOn(t, "0000:99:00.0", 1), 0, "serves no lane of this container")

	// Released staging is free, even if the limit is below the staging in use.
	h.configure(t, limited(64*mib))
	notAdmitted(t, c.claim(t, 512*mib), 0, "64 MiB (staging.limit)")
	admitted(t, c.claim(t, 64*mib))
	h.configure(t, limited(1<<30))
	admitted(t, a.claim(t, 576*mib))

	// Limits are per GPU: the configuration can set the limit of one GPU.
	h.configure(t, func(c *config.Config) { c.Staging.GPUs = map[string]config.Size{"100": 600 * mib} })
	notAdmitted(t, b.claim(t, 600*mib), 0, `600 MiB (staging.gpus."100")`)
	// Without a configured limit, the limit is a quarter of the memory.
	h.configure(t, func(*config.Config) {})
	notAdmitted(t, b.claim(t, 2<<30), 2<<30-640*mib, "2.0 GiB (a quarter of the GPU's memory")
	h.configure(t, func(c *config.Config) { c.CDI.Tenancy = config.TenancyMulti })
	multi := b.claim(t, 2<<30)
	notAdmitted(t, multi, 2<<30-640*mib, "2 others have 640 MiB")
	if strings.Contains(multi.Error, "trainer") {
		t.Errorf("the error names a container of another tenant: %s", multi.Error)
	}
}

// A killed relay keeps its staging until the process ends. Then the staging is free.
func TestAdmissionEndsWithTheRelay(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.configure(t, limited(1<<30))
	a, b := h.tenant(t, "a"), h.tenant(t, "b")
	admitted(t, a.claim(t, 1<<30))
	notAdmitted(t, b.claim(t, 64*mib), 0, "container a 1.0 GiB")

	first := h.info(t, a.generation).Status.Relay.PID
	kill := func(pid int) {
		t.Helper()
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		waitDead(t, pid)
	}
	// The first thread of a process can end before the remaining threads.
	free := func(c *tenant) {
		t.Helper()
		testutil.Succeeds(t, "what a killed relay had", func() error {
			if a := c.claim(t, 1<<30); !a.OK {
				return errors.New(a.Error)
			}
			return nil
		})
	}
	kill(first)
	free(b)
	h.staged(t, 1<<30) // of container b
	testutil.Succeeds(t, "the next relay", func() error {
		if s := h.info(t, a.generation).Status; s.State != generation.StateReady || s.Relay == nil ||
			s.Relay.PID == first {
			return errors.New("not ready")
		}
		return nil
	})
	notAdmitted(t, a.claim(t, 64*mib), 0, "container b 1.0 GiB") // the next relay has no staging

	// A relay survives the supervisor, and keeps the staging.
	survivor := h.info(t, b.generation).Status.Relay.PID
	kill(supervisorPID(t, b.generation))
	notAdmitted(t, a.claim(t, 64*mib), 0, "container b 1.0 GiB")
	kill(survivor)
	free(a)
}

// A false claim of a relay takes nothing from another relay: the hook limits a claim to the sum
// that the configuration of the relay allows, and applies the stated memory only to the claims of
// that relay.
func TestFalseClaimsAreRefused(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.configure(t, func(*config.Config) {})
	liar, honest := h.tenant(t, "liar"), h.tenant(t, "honest")
	limit := uint64(4<<30 + 2*32*mib)
	for _, memory := range []uint64{1 << 63, ^uint64(0), 0} {
		liar.memory = memory
		for _, bytes := range []uint64{1 << 61, 1 << 63, ^uint64(0), limit + 1} {
			notAdmitted(t, liar.claim(t, bytes), 0, "the relay's configuration permits 4.1 GiB")
		}
	}
	admitted(t, honest.claim(t, 2<<30)) // a quarter of the memory
	// The relay may claim the sum that its configuration allows, even if the stated memory is too
	// large.
	liar.memory = 1 << 63
	admitted(t, liar.claim(t, limit))
	admitted(t, liar.claim(t, 0))
	// Too small a stated memory lowers no limit of another relay.
	liar.memory = 4
	admitted(t, liar.claim(t, 0))
	notAdmitted(t, liar.claim(t, 2), 0, "1 B (a quarter of the GPU's memory")
	admitted(t, honest.claim(t, 1<<30))
	admitted(t, honest.claim(t, 2<<30))
	// A relay whose clients may copy needs staging memory for the clients too.
	copying := lane(3)
	copying.Copy = true
	copier := h.tenantWith(t, "copier", copying)
	copier.memory = 1 << 63
	notAdmitted(t, copier.claim(t, limit+4<<30+1), 0, "the relay's configuration permits 8.1 GiB")
	admitted(t, copier.claim(t, limit+4<<30))
	admitted(t, copier.claim(t, 0))
	// A configured limit overrides the memory that a relay states.
	h.configure(t, limited(3<<30))
	liar.memory = 1 << 63
	notAdmitted(t, liar.claim(t, 1<<30+1), 1<<30, "3.0 GiB (staging.limit)")
	// Refused claims do not fill the log.
	text, err := os.ReadFile(filepath.Join(h.layout.GenerationDir(liar.generation), "relay.log"))
	if err != nil || strings.Contains(string(text), "not admitted") {
		t.Errorf("the log: %s, %v", text, err)
	}
}

// The hook decides concurrent claims one after the other.
func TestConcurrentClaimsAreDecidedInTurn(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.configure(t, limited(1<<30))
	var tenants []*tenant
	for _, id := range []string{"a", "b", "c", "d"} {
		tenants = append(tenants, h.tenant(t, id))
	}
	for round := range 3 {
		for _, c := range tenants {
			c.ask(t, lane(3).Servers[0].BusID, 300*mib)
		}
		ok := 0
		for _, c := range tenants {
			if c.answer(t).OK {
				ok++
			}
		}
		if ok != 3 {
			t.Errorf("round %d: %d claims of 300 MiB were admitted to 1 GiB", round, ok)
		}
		for _, c := range tenants {
			admitted(t, c.claim(t, 0))
		}
	}
}

// The limit staging.host_limit applies to the sum of host memory of the relays. A relay can claim
// at most the sum that its configuration allows.
func TestHostMemoryIsAdmittedPerHost(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.configure(t, func(c *config.Config) {
		limit := config.Size(96 * mib)
		c.Staging.HostLimit = &limit
	})
	a, b := h.tenant(t, "a"), h.tenant(t, "b")
	admitted(t, a.claimOn(t, launch.HostMemory, 64*mib))
	notAdmitted(
		t,
		b.claimOn(t, launch.HostMemory, 33*mib),
		32*mib,
		"33 MiB of host memory requested: the limit of all relays of this host is 96 MiB (staging.host_limit)",
		"container a 64 MiB",
	)
	admitted(t, b.claimOn(t, launch.HostMemory, 32*mib))
	admitted(t, b.claim(t, 16*mib)) // GPU memory is a separate account
	h.staged(t, 16*mib)
	admitted(t, a.claimOn(t, launch.HostMemory, 16*mib))
	admitted(t, b.claimOn(t, launch.HostMemory, 80*mib))
	notAdmitted(t, a.claimOn(t, launch.HostMemory, 1<<40), 0, "the relay's configuration permits")
	if err := unix.Kill(b.info(t, b.generation).Status.Relay.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testutil.Succeeds(t, "the memory of a relay that ended", func() error {
		if got := a.claimOn(t, launch.HostMemory, 96*mib); !got.OK {
			return errors.New(got.Error)
		}
		return nil
	})
}
