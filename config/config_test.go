package config_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

func load(t *testing.T, text string) (config.Config, string, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	c, err := config.Load(path)
	return c, path, err
}

func TestMissingFileIsTheDefault(t *testing.T) {
	got, err := config.Load(filepath.Join(t.TempDir(), "config.toml"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(config.Default(), got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestDefaultsAreValid(t *testing.T) {
	got, _, err := load(t, "")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(config.Default(), got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestLoadEveryKeyIsRead(t *testing.T) {
	got, _, err := load(t, `
[hook]
on_failure = "warn"
annotations = true
[relay]
binary = "/opt/peerlane-relay"
launcher = "systemd"
route = "staged"
transport = "verbs"
scope = "host"
slots = 4
slot_size = "1MiB"
reserve = "start"
cuda_ipc = "never"
events = "timeline"
limits = { clients = 2, memories = 3, connections = 5, descriptors = 7, host_memory = "3GiB", client_host_memory = "2GiB", staging = "5GiB", client_staging = "6GiB" }
self_test = "required"
calibration = "off"
chunk = "4MiB"
depth = 6
streams = 3
environment = ["PEERLANE_CUDA_LIBRARY=/lib/sim.so", "EMPTY="]
sandbox = "off"
uids = "70000-70010"
sandbox_read = ["/opt/driver"]
sandbox_write = ["/dev/shm"]
memory = "8GiB"
cpus = 4
tasks = 512
[gdr]
max_path = "PHB"
nics = { mlx5_0 = "SYS" }
[plan]
near = "direct"
software = true
virtual_functions = true
rails = { mlx5_1 = 3 }
[plan.exclude]
gpus = ["7"]
nics = ["mlx5_2"]
pairs = [["0", "mlx5_0"], ["0", "1"]]
[[plan.lane]]
gpu = "0"
kind = "staged"
servers = ["1", "GPU-x"]
nics = ["emulated0"]
[staging]
limit = "2GiB"
gpus = { "1" = "0" }
bounce = "never"
bounce_limit = "2GiB"
[groups]
half0 = ["0", "1"]
[cdi]
tenancy = "multi"
[runtime]
path = "/usr/bin/crun"
devices = ["peerlane.dev/lane=*", "nvidia.com/gpu=3"]
[log]
format = "json"
[network]
listen = "off"
key = "/srv/cluster.key"
interfaces = "=ens1f0"
rails = ["mlx5_1", "ens1f0"]
address = "fe80::7%ens1f0"
family = "ipv6"
ports = "7000-7009"
streams = 2
tls_certificate = "/srv/host.pem"
tls_key = "/srv/host.key"
tls_authority = "/srv/ca.pem"
[verbs]
tc = 104
sl = 3
pkey = 1
mtu = 1024
timeout = 18
retry_cnt = 6
gid_index = 3
qps_per_connection = 4
reconnect_limit = 90
adaptive_routing = "on"
ar_threshold = 4096
relaxed_ordering = false
data_direct = false
`)
	if err != nil {
		t.Fatal(err)
	}
	limit := config.Size(2 << 30)
	want := config.Config{
		Hook: config.Hook{OnFailure: "warn", Annotations: true},
		Relay: config.Relay{
			Binary: "/opt/peerlane-relay", Launcher: "systemd", Route: "staged", Transport: "verbs", Scope: "host", Slots: 4,
			SlotSize: 1 << 20,
			SelfTest: "required", Calibration: "off", Chunk: 4 << 20, Depth: 6, Streams: 3,
			Reserve: "start", CUDAIPC: "never", Events: "timeline",
			Limits: config.Limits{Clients: 2, Memories: 3, Connections: 5, Descriptors: 7, HostMemory: 3 << 30,
				ClientHostMemory: 2 << 30, Staging: 5 << 30, ClientStaging: 6 << 30},
			Environment: []string{"PEERLANE_CUDA_LIBRARY=/lib/sim.so", "EMPTY="},
			Sandbox:     config.SandboxOff, UIDs: "70000-70010", SandboxRead: []string{"/opt/driver"},
			SandboxWrite: []string{"/dev/shm"},
			Memory:       8 << 30, CPUs: 4, Tasks: 512,
		},
		GDR: planner.GDRPolicy{MaxPath: topo.PHB, NICs: map[string]topo.PathType{"mlx5_0": topo.SYS}},
		Plan: config.Plan{
			Near: "direct", Software: true, VirtualFunctions: true, Rails: map[string]int{"mlx5_1": 3},
			Exclude: planner.Exclude{
				GPUs:  []string{"7"},
				NICs:  []string{"mlx5_2"},
				Pairs: [][]string{{"0", "mlx5_0"}, {"0", "1"}},
			},
			Lanes: []planner.Assignment{
				{GPU: "0", Kind: "staged", Servers: []string{"1", "GPU-x"}, NICs: []string{"emulated0"}},
			},
		},
		Staging: config.Staging{
			Bounce:      "never",
			BounceLimit: 2 << 30,
			Limit:       &limit,
			GPUs:        map[string]config.Size{"1": 0},
		},
		Groups:  map[string][]string{"half0": {"0", "1"}},
		CDI:     config.CDI{Tenancy: "multi"},
		Runtime: config.Runtime{Path: "/usr/bin/crun", Devices: []string{"peerlane.dev/lane=*", "nvidia.com/gpu=3"}},
		Network: config.Network{
			Listen: "off", Key: "/srv/cluster.key", Interfaces: "=ens1f0", Rails: []string{"mlx5_1", "ens1f0"},
			Address: "fe80::7%ens1f0", Family: "ipv6", Ports: "7000-7009", Streams: 2,
			TLSCertificate: "/srv/host.pem", TLSKey: "/srv/host.key", TLSAuthority: "/srv/ca.pem",
		},
		Log: config.Log{Format: "json"},
		Verbs: config.Verbs{TC: 104, SL: 3, PKey: 1, MTU: 1024, Timeout: 18, RetryCount: 6, GIDIndex: 3, QueuePairs: 4,
			ReconnectLimit: 90, AdaptiveRouting: "on", ARThreshold: 4096},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	path := filepath.Join(t.TempDir(), "config.toml")
	if err := got.Write(path); err != nil {
		t.Fatal(err)
	}
	again, err := config.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, again); diff != "" {
		t.Errorf("written and read (-want +got)\n%s", diff)
	}
	planning := got.PlannerConfig()
	bytes := uint64(limit)
	if diff := cmp.Diff(planner.Config{
		Near: "direct", GDR: want.GDR, Software: true, VirtualFunctions: true, Lanes: want.Plan.Lanes,
		Exclude: want.Plan.Exclude, Rails: want.Plan.Rails, Groups: want.Groups,
		Staging: planner.StagingConfig{Slots: 4, SlotBytes: 1 << 20, Limit: &bytes, GPUs: map[string]uint64{"1": 0}},
	}, planning); diff != "" {
		t.Errorf("Planning (-want +got)\n%s", diff)
	}
}

// keyOf returns the key in an error of this package or of the TOML library.
func keyOf(err error) string {
	var key *config.KeyError
	var syntax toml.ParseError
	switch {
	case errors.As(err, &key):
		return key.Key
	case errors.As(err, &syntax):
		return syntax.LastKey
	}
	return ""
}

// The error names the file and the key.
func TestLoadBadValueIsRefused(t *testing.T) {
	for _, test := range []struct{ name, text, key string }{
		{"unknown key", "[relay]\nslotsize = \"1MiB\"", "relay.slotsize"},
		{"an old key", "[plan]\ngdr_max_path = \"PXB\"", "plan.gdr_max_path"},
		{"a key of a pair", "[plan.exclude]\npair = [[\"0\", \"1\"]]", "plan.exclude.pair"},
		{"unknown table", "[nic]\nx = 1", "nic"},
		{"unknown key of a lane", "[[plan.lane]]\ngpu=\"0\"\nserver=[\"1\"]", "plan.lane.server"},
		{"no TOML", "relay", ""},
		{"wrong type", "[relay]\nslots = \"many\"", ""},
		{"listen", "[network]\nlisten = \"always\"", "network.listen"},
		{"a relative key", "[network]\nkey = \"cluster.key\"", "network.key"},
		{"interfaces", "[network]\ninterfaces = \"eth,,ib\"", "network.interfaces"},
		{"no address", "[network]\naddress = \"eth0\"", "network.address"},
		{"an IPv4 address in IPv6", "[network]\naddress = \"::ffff:10.0.0.1\"", "network.address"},
		{"any address", "[network]\naddress = \"0.0.0.0\"", "network.address"},
		{"any address of a zone", "[network]\naddress = \"::%eth0\"", "network.address"},
		{"an address of no family", "[network]\naddress = \"10.0.0.1\"\nfamily = \"ipv6\"", "network.address"},
		{"the form of a log", "[log]\nformat = \"xml\"", "log.format"},
		{"family", "[network]\nfamily = \"AF_INET\"", "network.family"},
		{"rails that are no names", "[network]\nrails = [\"eth0\", \"\"]", "network.rails"},
		{"a rail twice", "[network]\nrails = [\"eth0\", \"eth0\"]", "network.rails"},
		{"too many rails", "[network]\nrails = [" + strings.Repeat("\"a\", ", 17) + "]", "network.rails"},
		{"ports", "[network]\nports = \"20999-20000\"", "network.ports"},
		{"half of TLS", "[network]\ntls_certificate = \"/a\"\ntls_key = \"/b\"", "network.tls_certificate"},
		{"relative binary", "[relay]\nbinary = \"relay\"", "relay.binary"},
		{"on failure", "[hook]\non_failure = \"hope\"", "hook.on_failure"},
		{"launcher", "[relay]\nlauncher = \"upstart\"", "relay.launcher"},
		{"route", "[relay]\nroute = \"lane\"", "relay.route"},
		{"scope", "[relay]\nscope = \"rack\"", "relay.scope"},
		{"transport", "[relay]\ntransport = \"rdma\"", "relay.transport"},
		{"removed transport", "[relay]\ntransport = \"loop\"", "relay.transport"},
		{"a traffic class of nine bits", "[verbs]\ntc = 256", "verbs.tc"},
		{"an odd MTU", "[verbs]\nmtu = 1500", "verbs.mtu"},
		{"no timeout", "[verbs]\ntimeout = 0", "verbs.timeout"},
		{"negative queue pairs", "[verbs]\nqps_per_connection = -1", "verbs.qps_per_connection"},
		{"no time to reconnect", "[verbs]\nreconnect_limit = 0", "verbs.reconnect_limit"},
		{"adaptive routing", "[verbs]\nadaptive_routing = \"maybe\"", "verbs.adaptive_routing"},
		{"a negative threshold", "[verbs]\nar_threshold = -1", "verbs.ar_threshold"},
		{"self-test", "[relay]\nself_test = \"often\"", "relay.self_test"},
		{"calibration", "[relay]\ncalibration = \"yes\"", "relay.calibration"},
		{"odd chunk", "[relay]\nchunk = \"100KB\"", "relay.chunk"},
		{"many streams", "[relay]\nstreams = 100", "relay.streams"},
		{"no depth", "[relay]\ndepth = -1", "relay.depth"},
		{"no slots", "[relay]\nslots = 0", "relay.slots"},
		{"reserve", "[relay]\nreserve = \"never\"", "relay.reserve"},
		{"IPC", "[relay]\ncuda_ipc = \"maybe\"", "relay.cuda_ipc"},
		{"IPC of tenants", "[relay]\ncuda_ipc = \"allow\"\n[cdi]\ntenancy = \"multi\"", "relay.cuda_ipc"},
		{"events", "[relay]\nevents = \"maybe\"", "relay.events"},
		{"events of tenants", "[relay]\nevents = \"ipc\"\n[cdi]\ntenancy = \"multi\"", "relay.events"},
		{"bounce", "[staging]\nbounce = \"maybe\"", "staging.bounce"},
		{"no bounce", "[staging]\nbounce_limit = \"0B\"", "staging.bounce_limit"},
		{"no host memory", "[relay.limits]\nhost_memory = \"8B\"", "relay.limits.host_memory"},
		{"no clients", "[relay.limits]\nclients = 0", "relay.limits.clients"},
		{"unknown limit", "[relay.limits]\nrings = 9", "relay.limits.rings"},
		{"slot size", "[relay]\nslot_size = \"100kB\"", "relay.slot_size"},
		{"no size", "[relay]\nslot_size = \"big\"", "relay.slot_size"},
		{"uids of one", "[relay]\nuids = \"70000-70000\"", "relay.uids"},
		{"uids of root's", "[relay]\nuids = \"0-10\"", "relay.uids"},
		{"no uids", "[relay]\nuids = \"many\"", "relay.uids"},
		{"too many uids", "[relay]\nuids = \"1-4294967295\"", "relay.uids"},
		{"sandbox", "[relay]\nsandbox = \"on\"", "relay.sandbox"},
		{"the whole host", "[relay]\nsandbox_read = [\"/\"]", "relay.sandbox_read"},
		{"little memory", "[relay]\nmemory = \"1MiB\"", "relay.memory"},
		{"no processor", "[relay]\ncpus = 0", "relay.cpus"},
		{"few tasks", "[relay]\ntasks = 1", "relay.tasks"},
		{"environment", "[relay]\nenvironment = [\"NAME\"]", "relay.environment"},
		{"path type", "[gdr]\nmax_path = \"PXX\"", "gdr.max_path"},
		{"relative runtime", "[runtime]\npath = \"crun\"", "runtime.path"},
		{"every device", "[runtime]\ndevices = [\"*\"]", "runtime.devices"},
		{"devices of every vendor", "[runtime]\ndevices = [\"*/lane=1\"]", "runtime.devices"},
		{"devices without a class", "[runtime]\ndevices = [\"peerlane.dev/=1\"]", "runtime.devices"},
		{"devices without a name", "[runtime]\ndevices = [\"peerlane.dev/lane=\"]", "runtime.devices"},
		{"a pattern without end", "[runtime]\ndevices = [\"peerlane.dev/lane=[1\"]", "runtime.devices"},
		{"tenancy", "[cdi]\ntenancy = \"many\"", "cdi.tenancy"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, path, err := load(t, test.text)
			var f *fault.Error
			if !errors.As(err, &f) || f.Code != fault.Configuration || f.Object != path {
				t.Fatalf("error %v; want %s of %s", err, fault.Configuration, path)
			}
			if key := keyOf(err); key != test.key {
				t.Errorf("error %v is that of the key %q, want %q", err, key, test.key)
			}
		})
	}
}

func TestLoadUnreadableFileIsRefused(t *testing.T) {
	if _, err := config.Load(t.TempDir()); err == nil {
		t.Error("a directory was read as configuration")
	}
}

func TestDeviceMatchesPatternOfDevices(t *testing.T) {
	for _, test := range []struct {
		pattern, device string
		want            bool
	}{
		{"peerlane.dev/lane=3", "peerlane.dev/lane=3", true},
		{"peerlane.dev/lane=3", "peerlane.dev/lane=33", false},
		{"peerlane.dev/lane=3", "peerlane.dev/gpu=3", false},
		{"peerlane.dev/lane=*", "peerlane.dev/lane=3", true},
		{"peerlane.dev/lane=*", "peerlane.dev/lane=all", true},
		{"peerlane.dev/lane=*", "peerlane.dev/lane=0000:17:00.0", true},
		{"peerlane.dev/lane=*", "nvidia.com/lane=3", false},
		{"peerlane.dev/lane=*", "peerlane.dev/lane", false},
		{"peerlane.dev/lane=[0-3]", "peerlane.dev/lane=2", true},
		{"peerlane.dev/lane=[0-3]", "peerlane.dev/lane=4", false},
		{"peerlane.dev/lane=GPU-?", "peerlane.dev/lane=GPU-1", true},
		{"peerlane.dev/lane=[", "peerlane.dev/lane=[", false},
	} {
		if got := config.DeviceMatches(test.pattern, test.device); got != test.want {
			t.Errorf("%s permits %s: %v", test.pattern, test.device, got)
		}
	}
}
