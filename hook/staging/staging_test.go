package staging

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/testprocess"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/relay/launch"
)

const (
	ownID   = "00000000000000000000000000000001"
	otherID = "00000000000000000000000000000002"
	gpu0    = "0000:17:00.0"
	gpu1    = "0000:2a:00.0"
	spare   = "0000:3b:00.0"
	mib     = 1 << 20
)

// host returns a layout with this configuration.
func host(t *testing.T, configuration string) paths.Layout {
	t.Helper()
	l := paths.New(t.TempDir())
	if err := errors.Join(l.Create(), os.WriteFile(l.ConfigFile(), []byte(configuration), 0o644)); err != nil {
		t.Fatal(err)
	}
	return l
}

// add makes a generation with a lane on gpu0, of 8 slots of 16 MiB, and with a spare.
func add(t *testing.T, l paths.Layout, id string) *generation.Generation {
	t.Helper()
	if err := os.Mkdir(l.GenerationDir(id), 0o700); err != nil {
		t.Fatal(err)
	}
	g := &generation.Generation{ID: id, Container: generation.Container{ID: "container-" + id[31:]}, Created: time.Now()}
	g.Config.Slots, g.Config.SlotBytes = 8, 16*mib
	g.Config.Lanes = []launch.Lane{{
		Servers: []launch.GPU{{Index: 0, BusID: gpu0, UUID: "GPU-0"}},
		Spares:  []launch.Spare{{GPU: launch.GPU{Index: 2, BusID: spare}}},
	}}
	g.Config.OwnHostMemory = 64 * mib
	if err := g.Write(l); err != nil {
		t.Fatal(err)
	}
	return g
}

// The relays of a host share the limit of a GPU; a claim is admitted within the rest.
func TestAdmitSharesLimitBetweenLiveRelays(t *testing.T) {
	l := host(t, "[staging]\nlimit = \"100MiB\"\nhost_limit = \"50MiB\"\n")
	add(t, l, ownID)
	add(t, l, otherID)
	relay := testprocess.Own(t)
	for i, c := range []struct {
		name  string
		id    string
		relay process.Process
		gpu   string
		bytes uint64
		free  uint64
		ok    bool
	}{
		{"the first", otherID, relay, gpu0, 60 * mib, 40 * mib, true},
		{"the rest", ownID, relay, gpu0, 40 * mib, 0, true},
		{"less again", ownID, relay, gpu0, 30 * mib, 10 * mib, true},
		{"a byte above the rest", ownID, relay, gpu0, 40*mib + 1, 40 * mib, false},
		{"as much as before", ownID, relay, gpu0, 30 * mib, 10 * mib, true},
		{"another GPU", ownID, relay, spare, 100 * mib, 0, true},
		{"a byte more on another GPU", ownID, relay, spare, 100*mib + 1, 100 * mib, false},
		{"host memory", ownID, relay, launch.HostMemory, 20 * mib, 30 * mib, true},
		{"the rest of host memory", otherID, relay, launch.HostMemory, 30 * mib, 0, true},
		{"a byte more of host memory", otherID, relay, launch.HostMemory, 30*mib + 1, 30 * mib, false},
		{"the end", ownID, relay, gpu0, 0, 40 * mib, true},
		{"the other's rest", otherID, relay, gpu0, 100 * mib, 0, true},
		{"nothing", ownID, relay, gpu0, 1, 0, false},
		{"nothing on another GPU", ownID, relay, spare, 0, 100 * mib, true},
		{"a relay that ends", otherID, testprocess.Ended(t), gpu0, 90 * mib, 10 * mib, true},
		{"the memory of an ended relay", ownID, relay, gpu0, 100 * mib, 0, true},
	} {
		number := uint64(i) + 1
		a, err := Admit(l, c.id, c.relay, launch.Claim{Claim: number, GPU: c.gpu, Bytes: c.bytes, Memory: 1 << 40})
		if err != nil || a.Claim != number || a.OK != c.ok || a.Free != c.free || (a.Error == "") != c.ok {
			t.Errorf("%s: %+v, %v", c.name, a, err)
		}
	}
	staged, err := StagingByGPU(l)
	if want := map[string]uint64{gpu0: 100 * mib}; err != nil || !maps.Equal(staged, want) {
		t.Errorf("staged %v, %v; want %v", staged, err, want)
	}
	s, err := readShare(l, ownID)
	if err != nil || s.Host != 20*mib || s.Container != "container-1" || s.Relay != relay {
		t.Errorf("share %+v, %v", s, err)
	}
	// A new relay of a container begins without a share.
	if a, err := Admit(l, ownID, testprocess.Ended(t), launch.Claim{GPU: gpu0, Bytes: mib}); err != nil || !a.OK {
		t.Errorf("%+v, %v", a, err)
	}
	if s, err := readShare(l, ownID); err != nil || s.Host != 0 || !maps.Equal(s.GPUs, map[string]uint64{gpu0: mib}) {
		t.Errorf("the share of a new relay is %+v, %v", s, err)
	}
}

// A limit that was lowered below the held memory admits no more, and still permits the present.
func TestAdmitBelowHeldMemoryKeepsPresent(t *testing.T) {
	l := host(t, "[staging]\nlimit = \"100MiB\"\n")
	add(t, l, ownID)
	relay := testprocess.Own(t)
	for _, c := range []struct {
		limit string
		bytes uint64
		ok    bool
	}{{"100MiB", 80 * mib, true}, {"10MiB", 80 * mib, true}, {"10MiB", 80*mib + 1, false}, {"10MiB", 50 * mib, true},
		{"10MiB", 60 * mib, false}} {
		if err := os.WriteFile(l.ConfigFile(), []byte("[staging]\nlimit = \""+c.limit+"\"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if a, err := Admit(l, ownID, relay, launch.Claim{GPU: gpu0, Bytes: c.bytes}); err != nil || a.OK != c.ok {
			t.Errorf("%d MiB of %s: %+v, %v", c.bytes/mib, c.limit, a, err)
		}
	}
}

func TestAdmitInvalidClaimFails(t *testing.T) {
	l := host(t, "[staging]\nlimit = \"100GiB\"\nhost_limit = \"100GiB\"\n")
	g := add(t, l, ownID)
	const slots = 2 * (8*16*mib + maxGranule) // both directions of a lane
	for _, c := range []struct {
		name  string
		id    string
		claim launch.Claim
		ok    bool
	}{
		{"all slots", ownID, launch.Claim{GPU: gpu0, Bytes: slots}, true},
		{"a byte above the slots", ownID, launch.Claim{GPU: gpu0, Bytes: slots + 1}, false},
		{"a spare GPU", ownID, launch.Claim{GPU: spare, Bytes: slots}, true},
		{"a GPU of no lane", ownID, launch.Claim{GPU: gpu1, Bytes: 1}, false},
		{"the container's host memory", ownID, launch.Claim{GPU: launch.HostMemory, Bytes: 64*mib + maxGranule}, true},
		{"a byte of host memory more", ownID, launch.Claim{GPU: launch.HostMemory, Bytes: 64*mib + maxGranule + 1}, false},
		{"another generation", otherID, launch.Claim{GPU: gpu0, Bytes: 1}, false},
	} {
		a, err := Admit(l, c.id, testprocess.Own(t), c.claim)
		if (err == nil) != c.ok || a.OK != c.ok {
			t.Errorf("%s: %+v, %v", c.name, a, err)
		}
		if c.id == otherID && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if err := os.WriteFile(l.ConfigFile(), []byte("[staging"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, gpu := range []string{gpu0, launch.HostMemory} {
		if a, err := Admit(l, g.ID, testprocess.Own(t), launch.Claim{GPU: gpu, Bytes: 1}); err == nil {
			t.Errorf("%s with a damaged configuration: %+v", gpu, a)
		}
	}
}

func TestAdmitDamagedShareOfOtherGeneration(t *testing.T) {
	l := host(t, "[staging]\nlimit = \"100MiB\"\n")
	add(t, l, ownID)
	add(t, l, otherID)
	share := shareFile(l, otherID)
	if err := os.WriteFile(share, []byte("{"), 0o600); err != nil { // of an earlier boot
		t.Fatal(err)
	}
	claim := launch.Claim{GPU: gpu0, Bytes: mib}
	if a, err := Admit(l, ownID, testprocess.Own(t), claim); err != nil || !a.OK {
		t.Errorf("a damaged share: %+v, %v", a, err)
	}
	if err := errors.Join(os.Remove(share), os.Mkdir(share, 0o700)); err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func() error{
		"Admit":       func() error { _, err := Admit(l, ownID, testprocess.Own(t), claim); return err },
		"the own one": func() error { _, err := Admit(l, otherID, testprocess.Own(t), claim); return err },
		"Staged":      func() error { _, err := StagingByGPU(l); return err },
	} {
		if err := call(); !errors.Is(err, unix.EISDIR) {
			t.Errorf("%s: an unreadable share: %v", name, err)
		}
	}
	// Every call has released the lock of the host.
	held, err := generation.LockDirectory(l.State(), 0)
	if err != nil {
		t.Fatal(err)
	}
	held.Close()
}

// With several tenants, a refusal does not name the containers of others.
func TestAdmitOfSeveralTenantsNamesNoHolder(t *testing.T) {
	for tenancy, named := range map[string]bool{config.TenancySingle: true, config.TenancyMulti: false} {
		l := host(t, fmt.Sprintf("[cdi]\ntenancy = %q\n[staging]\nlimit = \"1MiB\"\nhost_limit = \"1MiB\"\n", tenancy))
		add(t, l, ownID)
		add(t, l, otherID)
		for _, gpu := range []string{gpu0, launch.HostMemory} {
			claim := launch.Claim{GPU: gpu, Bytes: mib}
			if a, err := Admit(l, otherID, testprocess.Own(t), claim); err != nil || !a.OK {
				t.Fatalf("%s: %+v, %v", tenancy, a, err)
			}
			a, err := Admit(l, ownID, testprocess.Own(t), claim)
			if err != nil || a.OK || strings.Contains(a.Error, "container-2") != named {
				t.Errorf("%s, %s: %+v, %v", tenancy, gpu, a, err)
			}
		}
	}
}

func TestGrantedCountsLanesOfGPU(t *testing.T) {
	c := launch.Config{Slots: 2, SlotBytes: 100}
	near, far := launch.GPU{BusID: gpu0}, launch.GPU{BusID: gpu1}
	c.Lanes = []launch.Lane{
		{Servers: []launch.GPU{near}}, {Servers: []launch.GPU{far, near}}, {Servers: []launch.GPU{far}},
		{Servers: []launch.GPU{far}, Spares: []launch.Spare{{GPU: near}}},
	}
	one := granted(launch.Config{Slots: 2, SlotBytes: 100, Lanes: c.Lanes[:1]}, gpu0)
	for gpu, lanes := range map[string]uint64{gpu0: 3, gpu1: 3, spare: 0} {
		if got := granted(c, gpu); got != lanes*one {
			t.Errorf("%s: %d bytes, want %d lanes of %d", gpu, got, lanes, one)
		}
	}
	c.Lanes[0].Copy = true
	c.Limits.Staging = 1000
	for gpu, want := range map[string]uint64{gpu0: 3*one + 1000, gpu1: 3 * one} {
		if got := granted(c, gpu); got != want {
			t.Errorf("%s, whose clients copy: %d bytes, want %d", gpu, got, want)
		}
	}
}

func TestGrantedHostFollowsConfiguration(t *testing.T) {
	g := &generation.Generation{NetworkMemory: 30}
	g.Config.Bounce, g.Config.Limits.HostMemory = 200, 1000
	if got := grantedHost(g); got != 1230+maxGranule {
		t.Errorf("%d bytes", got)
	}
	g.Config.OwnHostMemory = 7
	if got := grantedHost(g); got != 7+maxGranule {
		t.Errorf("%d bytes of its own", got)
	}
}

func TestHostLimitDefaultIsQuarterOfMemory(t *testing.T) {
	var system unix.Sysinfo_t
	if err := unix.Sysinfo(&system); err != nil {
		t.Fatal(err)
	}
	limit, key, err := hostLimit(config.Staging{})
	if want := uint64(system.Totalram) * uint64(system.Unit) / 4; err != nil || limit != want || key == "" {
		t.Errorf("%d (%s), %v; want %d", limit, key, err, want)
	}
	size := config.Size(7)
	if limit, key, err := hostLimit(config.Staging{HostLimit: &size}); err != nil || limit != 7 ||
		key != "staging.host_limit" {
		t.Errorf("%d (%s), %v", limit, key, err)
	}
}

func TestStagingLimitPrefersKeyOfGPU(t *testing.T) {
	general := config.Size(9)
	gpu := launch.GPU{Index: 3, UUID: "GPU-aB", BusID: "0000:0a:00.0"}
	for _, c := range []struct {
		name   string
		gpus   map[string]config.Size
		limit  *config.Size
		memory uint64
		want   uint64
		key    string
	}{
		{"nothing", nil, nil, 0, unlimited, ""},
		{"the memory of the GPU", nil, nil, 401, 100, "a quarter of the GPU's memory, the default of staging.limit"},
		{"one byte", nil, nil, 1, 0, "a quarter of the GPU's memory, the default of staging.limit"},
		{"the general limit", nil, &general, 400, 9, "staging.limit"},
		{"the index", map[string]config.Size{"3": 5}, &general, 400, 5, `staging.gpus."3"`},
		{"the UUID in other letters", map[string]config.Size{"gpu-Ab": 5}, &general, 400, 5, `staging.gpus."gpu-Ab"`},
		{"the address in other letters", map[string]config.Size{"0000:0A:00.0": 5}, nil, 0, 5, `staging.gpus."0000:0A:00.0"`},
		{"other GPUs", map[string]config.Size{"0": 5, "GPU-x": 6, "0000:0b:00.0": 7, "": 8}, &general, 400, 9,
			"staging.limit"},
		{"two names", map[string]config.Size{"3": 5, "GPU-aB": 6}, nil, 0, 5, `staging.gpus."3"`},
	} {
		if got, key := stagingLimit(config.Staging{GPUs: c.gpus, Limit: c.limit}, gpu, c.memory); got != c.want ||
			key != c.key {
			t.Errorf("%s: %d (%s), want %d (%s)", c.name, got, key, c.want, c.key)
		}
	}
	none := launch.GPU{Index: 3, BusID: "0000:0a:00.0"}
	if got, _ := stagingLimit(config.Staging{GPUs: map[string]config.Size{"": 5}}, none, 0); got != unlimited {
		t.Errorf("a GPU without a UUID has the limit %d of an empty name", got)
	}
}

// The refusal names the largest holders; with several tenants it names none.
func TestFullNamesHoldersOfOneTenant(t *testing.T) {
	var holders []holder
	for i := range maxHolders + 2 {
		holders = append(holders, holder{fmt.Sprintf("name%d", i), 10})
	}
	for _, c := range []struct {
		name    string
		holders []holder
		tenants bool
		named   int
		more    bool
	}{
		{"none", nil, false, 0, false},
		{"none of several tenants", nil, true, 0, false},
		{"one", holders[:1], false, 1, false},
		{"the limit", holders[:maxHolders], false, maxHolders, false},
		{"one more", holders[:maxHolders+1], false, maxHolders, true},
		{"several tenants", holders, true, 0, false},
	} {
		text := full("asked", 100, "key", 60, c.holders, c.tenants)
		named := 0
		for _, h := range holders {
			if strings.Contains(text, h.container) {
				named++
			}
		}
		if named != c.named || strings.Contains(text, "more") != c.more || !strings.HasPrefix(text, "asked") {
			t.Errorf("%s: %q", c.name, text)
		}
	}
}

func TestHoldersAreSortedByBytesAndName(t *testing.T) {
	l := host(t, "")
	relay := testprocess.Own(t)
	for i, bytes := range []uint64{5, 7, 0, 7, 6} {
		id := fmt.Sprintf("%032x", i+1)
		add(t, l, id)
		s := share{Relay: relay, Container: string(rune('z' - i)), Host: bytes}
		if i == 4 {
			s.Relay = testprocess.Ended(t)
		}
		if err := generation.WriteJSON(shareFile(l, id), s); err != nil {
			t.Fatal(err)
		}
	}
	host := func(s share) uint64 { return s.Host }
	got, err := holdersOf(l, "", host)
	if want := []holder{{"w", 7}, {"y", 7}, {"z", 5}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	got, err = holdersOf(l, fmt.Sprintf("%032x", 2), host)
	if want := []holder{{"w", 7}, {"z", 5}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("without one: %v, %v; want %v", got, err, want)
	}
	if err := os.RemoveAll(filepath.Dir(l.GenerationDir("x"))); err != nil {
		t.Fatal(err)
	}
	if got, err := holdersOf(l, "", host); err != nil || got != nil {
		t.Errorf("without generations: %v, %v", got, err)
	}
}
