package fault

import "slices"

// Codes by area: 10 configuration and privileges, 11 topology and specifications, 12 the start
// of a container, 13 the life of a relay, 14 clients, 15 staging and GPUs, 16 the network
// between hosts, 17 RDMA.
const (
	Configuration Code = "PL1001"
	UntrustedFile Code = "PL1002"
	NotRoot       Code = "PL1003"

	UnreadablePlan     Code = "PL1101"
	StaleSpecification Code = "PL1102"
	UnknownTopology    Code = "PL1103"
	NoEngine           Code = "PL1104"
	DeviceNotPermitted Code = "PL1105"

	MountBelowSocket  Code = "PL1201"
	SocketPathLeads   Code = "PL1202"
	AnchorNotMounted  Code = "PL1203"
	HiddenGPU         Code = "PL1204"
	Annotation        Code = "PL1205"
	Checkpoint        Code = "PL1206"
	MountNotPermitted Code = "PL1207"
	LockedMemory      Code = "PL1208"

	NoRelayProgram Code = "PL1301"
	NoRelayUID     Code = "PL1302"
	NoSandbox      Code = "PL1303"
	NoSystemd      Code = "PL1304"
	RelayDown      Code = "PL1305"
	Drained        Code = "PL1306"
	Unkillable     Code = "PL1307"

	NoRelay     Code = "PL1401"
	NoLane      Code = "PL1402"
	NotExported Code = "PL1403"
	LimitMet    Code = "PL1404"

	NoStaging Code = "PL1501"
	NoCUDA    Code = "PL1502"
	UnfitPair Code = "PL1503"

	NoNetwork     Code = "PL1601"
	Unreachable   Code = "PL1602"
	NoPort        Code = "PL1603"
	NoInterface   Code = "PL1604"
	NoClusterKey  Code = "PL1605"
	KeyNotProven  Code = "PL1606"
	NICLeftOut    Code = "PL1701"
	NotRegistered Code = "PL1702"
	RDMAFailed    Code = "PL1703"
)

// Entry describes a code for an operator.
type Entry struct {
	Code  Code   `json:"code"`
	Title string `json:"title"`
	// Cause explains the error in a sentence or two.
	Cause string `json:"cause"`
	// Remedies are actions, the most frequent action first. Text between backquotes is a
	// command, a path or a key of config.toml.
	Remedies []string `json:"remedies"`
	// See is a page of the documentation, such as "cdi.md"; empty for none.
	See string `json:"see,omitempty"`
}

// Entries returns the catalogue, by code.
func Entries() []Entry { return slices.Clone(entries) }

// Find returns the entry of a code.
func Find(c Code) (Entry, bool) {
	i := slices.IndexFunc(entries, func(e Entry) bool { return e.Code == c })
	if i < 0 {
		return Entry{}, false
	}
	return entries[i], true
}

var entries = []Entry{
	{Configuration, "config.toml has a fault",
		"`/etc/peerlane/config.toml` has a syntax error, an unknown key or an impossible value. `peerlane` stops. The " +
			"hook uses the last good copy, `/var/lib/peerlane/config.good.toml`; without a copy no container with a lane " +
			"starts.",
		[]string{"Correct the key that the error names.", "For a key that names a device, compare `peerlane topo`."},
		"configuration.md"},
	{UntrustedFile, "users other than root can change a file",
		"Programs that run as root use the file. But another user can write the file or its directory, another user " +
			"can " +
			"read a secret in the file, or the path is a link or a directory.",
		[]string{"`chown root` and `chmod go-w` the file or the directory that the error names.",
			"If another user could read a key, run `chmod 600` on the file and replace the key: `peerlane key rotate`.",
			"Replace a link or a directory by a file."}, "security.md"},
	{NotRoot, "the command needs root",
		"Only root can read the file, the state of relays or the configuration space of a device.",
		[]string{"Run the command with `sudo`.", "To try a command, use files in other directories: `--root`, " +
			"`--spec-dir`."},
		"cli.md"},

	{UnreadablePlan, "the plan is missing or unreadable",
		"`/var/lib/peerlane/plan.json` was not installed, is damaged, is of another release, or was made from a file " +
			"instead of this host.",
		[]string{"Run `peerlane cdi refresh`."}, "cdi.md"},
	{StaleSpecification, "the CDI specification does not fit the host",
		"A GPU was moved, replaced or renumbered after the specification was written.",
		[]string{"Run `peerlane cdi refresh`; `peerlane cdi validate` lists the differences."}, "cdi.md#validate"},
	{UnknownTopology, "the input file is no known topology",
		"The content of `--input` is neither a capture, nor NCCL's XML, hwloc's XML or the text of nvidia-smi; or the " +
			"file is damaged.",
		[]string{"Make a capture with `peerlane topo capture`.",
			"Write NCCL's file with NCCL_TOPO_DUMP_FILE, hwloc's with `lstopo --of xml`, or use `nvidia-smi topo -m`."},
		"topology.md#a-file"},
	{NoEngine, "a container engine is missing or does not answer",
		"`peerlane runtime` did not find the engine's program, or its daemon did not report a version.",
		[]string{"Start the engine's service.", "Name another engine with `--runtime`."},
		"containers.md#engines-are-configured"},
	{DeviceNotPermitted, "a container requests a device that is not permitted",
		"An image can set PEERLANE_DEVICES and annotations, so only devices of `runtime.devices` are permitted.",
		[]string{"Add the device to `runtime.devices` in config.toml.", "Make a runtime with `--peerlane-device`."},
		"containers.md#engines-without-cdi"},

	{MountBelowSocket, "a volume covers the relay's socket",
		"The container's configuration has a mount below `/run/peerlane`, from `-v`, `--mount` or VOLUME of the image.",
		[]string{"Remove that volume."}, "containers.md#content-of-a-container"},
	{SocketPathLeads, "/run/peerlane of the image leads elsewhere",
		"The image has a link or a file at `/run/peerlane`, another mount covers it, or the specification is stale.",
		[]string{"Use an image without that link.", "Run `peerlane cdi refresh`."}, "security.md"},
	{AnchorNotMounted, "the anchor is not mounted",
		"The empty directory that containers get at `/run/peerlane` must be a read-only mount in the engine's mount " +
			"namespace. It was not mounted at boot, was unmounted, or was mounted elsewhere.",
		[]string{"Run `peerlane cdi anchor` on the host; from a container or a unit with a mount namespace: `nsenter " +
			"--target 1 --mount peerlane cdi anchor`.", "Run `systemctl enable --now peerlane-anchor.service` for the " +
			"next " +
			"boot.", "Restart the engine if it has its own mount namespace and started before the mount."},
		"upgrade.md#the-anchor"},
	{HiddenGPU, "two gpu= devices would hide a GPU",
		"Each `peerlane.dev/gpu=` sets CUDA_VISIBLE_DEVICES, and the last device replaces the value of earlier devices.",
		[]string{"Request one device for all GPUs: `peerlane.dev/gpu=all` or a group.",
			"Use lanes: `--device nvidia.com/gpu=N --device peerlane.dev/lane=N` for each GPU."},
		"containers.md#two-gpu-in-one-container"},
	{Annotation, "a lane by annotation is not possible",
		"The container has the annotation `peerlane.dev/lanes`, but `hook.annotations` is off or the engine did not " +
			"mount " +
			"the anchor.",
		[]string{"Set `annotations = true` in `[hook]` of config.toml.", "Add the mount that the error shows."},
		"containers.md#a-directory-of-hooks"},
	{Checkpoint, "a container with a lane cannot be restored",
		"The relay ended with the process that was checkpointed.",
		[]string{"Start a new container."}, "containers.md#while-a-container-runs"},
	{MountNotPermitted, "the kernel refuses a mount",
		"The hook lacks CAP_SYS_ADMIN, the kernel is older than Linux 5.12, or the engine has no free file descriptor.",
		[]string{"Run the engine as root, or see the rootless setup.", "Update the kernel.",
			"Raise `LimitNOFILE=` in the engine's unit, or `fs.file-max`."}, "containers.md#rootless"},
	{LockedMemory, "the limit of locked memory cannot be raised",
		"Memory that a program registers with a NIC counts for RLIMIT_MEMLOCK. The engine may not raise this limit, " +
			"or it " +
			"runs without root.",
		[]string{"Start the container with `--ulimit memlock=-1`.", "Set `LimitMEMLOCK=infinity` in the engine's unit.",
			"Without root, request `peerlane.dev/lane=` in place of `gpu=` and " +
				"`nic=`."}, "containers.md#registering-memory"},

	{NoRelayProgram, "peerlane-relay or peerlane-hook cannot be executed",
		"The program is not beside peerlane-hook, the file system is mounted noexec, or its dynamic linker is missing.",
		[]string{"Install the package `peerlane` again.", "Set `relay.binary` in config.toml."}, "packages.md"},
	{NoRelayUID, "all uids of relays are in use",
		"More relays run than `relay.uids` has uids.",
		[]string{"Set a larger range in `relay.uids`.", "Remove remains of ended containers: `peerlane relay gc`."},
		"relay.md#sandbox"},
	{NoSandbox, "the relay's sandbox does not start, or lacks a part",
		"A step of the sandbox failed or did not end in time: the error names the system call. Or the host lacks a " +
			"part, " +
			"such as Landlock or a control group: the relay works without that part, `peerlane relay inspect` shows the " +
			"part, and " +
			"without a control group the kernel does not enforce `relay.memory`.",
		[]string{"Start the container again; on a loaded host the step can time out.",
			"For a missing part, boot a newer kernel; for a control group, mount cgroup2 where the container runtime " +
				"starts, " +
				"or enable peerlane-relay.socket.", "Set `sandbox = \"off\"` in `[relay]` to test whether the sandbox is " +
				"the " +
				"cause.", "Read the log of the generation."}, "relay.md#sandbox"},
	{NoSystemd, "systemd starts no relay",
		"peerlane-relay.socket is missing, is of another release, or its service does not answer.",
		[]string{"Run `systemctl enable --now peerlane-relay.socket`.", "Read `journalctl -u 'peerlane-relay@*'`.",
			"Set `relay.launcher` to \"auto\" or \"fork\"."}, "relay.md#launchers"},
	{RelayDown, "a relay stays down",
		"The relay failed 5 times within a minute. The error contains the last failure.",
		[]string{"Read its log: `peerlane relay inspect NAME`.", "Remove the cause, then run `peerlane relay resume " +
			"NAME`.",
			"After a CUDA error, run `peerlane doctor` and see the check xid."}, "relay.md#when-a-relay-dies"},
	{Drained, "all relays of this host are drained",
		"An administrator ran `peerlane relay drain --all`.",
		[]string{"Run `peerlane relay resume --all`."}, "relay.md#drain-before-a-driver-update-or-a-reset-of-a-gpu"},
	{Unkillable, "a relay does not end by SIGKILL",
		"A driver or file system blocks the relay in a system call; `/proc/PID/stack` shows the call.",
		[]string{"Look for an Xid in the kernel's log.", "Reset the GPU, or restart the host."}, "relay.md"},

	{NoRelay, "no relay answers at the socket",
		"The container was started without a lane, or its relay did not start and `hook.on_failure` is \"warn\".",
		[]string{"Start the container with the `--device peerlane.dev/lane=` that the error names.",
			"On the host, read `journalctl -t peerlane-hook`, and run `peerlane relay list`."}, "containers.md"},
	{NoLane, "the container has no lane of this GPU",
		"The memory or the connection belongs to a GPU, and the container does not have the lane of that GPU.",
		[]string{"Start the container with `--device peerlane.dev/lane=` of that GPU."}, "containers.md"},
	{NotExported, "the exported descriptor is no GPU memory",
		"A program passed a descriptor that is not a whole allocation of CUDA's virtual memory management.",
		[]string{"Export memory that cuMemCreate made with a POSIX file descriptor " +
			"handle."}, "libpeerlane.md#which-memory"},
	{LimitMet, "the container has reached a limit of its relay",
		"The error names the limit.",
		[]string{"Free objects that the program does not use.", "Raise the key that the error names, or the " +
			"container's memory " +
			"limit."}, "relay.md#limits-of-a-container"},

	{NoStaging, "no server GPU has room for staging",
		"The error has each GPU's reason: limit, other relays, free memory, or a failed self-test. `staging.bounce` " +
			"determines the use of host memory.",
		[]string{"Free memory on the server GPUs; `peerlane relay list` shows the holders.",
			"Lower `relay.slots` or `relay.slot_size`, or raise `staging.limit`.", "Set `staging.bounce` to \"allow\"."},
		"relay.md#staging-on-the-server-gpus"},
	{NoCUDA, "NVIDIA's driver cannot be used",
		"The relay does not find libcuda in its sandbox, nvidia-uvm is not loaded, or a device node is missing. " +
			"Without " +
			"libnvidia-ml.so.1 a topology lacks UUIDs, NVLinks and MIG.",
		[]string{"Run `nvidia-smi` and `peerlane doctor` on the host.",
			"Install the driver, or run the command on the host, not in a container.",
			"For a driver in an unusual place, set `relay.sandbox_read`."}, "doctor.md#driver"},
	{UnfitPair, "a pair of GPUs failed its self-test",
		"Copies between the two GPUs delivered wrong bytes or were slower than copies through host memory.",
		[]string{"See the checks acs and iommu of `peerlane doctor`.", "Exclude the pair: `plan.exclude.pairs`.",
			"Test again: `peerlane self-test --again`."}, "relay.md#pairs-of-gpus"},

	{NoNetwork, "the relay is on no network",
		"The relay found no cluster key or no usable address at its start, or `network.listen` is \"off\".",
		[]string{"Copy the cluster key to this host, and restart the relay: `peerlane relay stop NAME && peerlane " +
			"relay " +
			"resume NAME`.", "See `network.listen`, `network.interfaces` and `network.family`."}, "network.md"},
	{Unreachable, "the relay of another host cannot be reached",
		"The relay could not connect: a firewall blocks the port, the address is of another network, or the host is " +
			"down.",
		[]string{"Run `peerlane doctor --connect HOST`.", "Open `network.ports` between the hosts.",
			"Set `network.interfaces`."}, "network.md"},
	{NoPort, "all ports of network.ports are in use",
		"Each relay listens on one port per rail.",
		[]string{"Set a larger range on all hosts.", "See the users of the ports: `ss -ltn`."},
		"network.md#interfaces-addresses-ports"},
	{NoInterface, "no network interface is usable by relays",
		"`network.interfaces` and `network.family` leave no interface with an address. The error has the reason for " +
			"each.",
		[]string{"Set `network.interfaces` or `network.family`."}, "network.md#interfaces-addresses-ports"},
	{NoClusterKey, "this host has no cluster key",
		"The file `/etc/peerlane/cluster.key` does not exist.",
		[]string{"Copy the file of another host.", "On the first host, run `peerlane key generate`."},
		"network.md#the-cluster-key"},
	{KeyNotProven, "the relay of another host does not prove the cluster key",
		"The two hosts have different cluster keys or releases, the other relay has too many connections, the address " +
			"belongs to " +
			"another program, or the handle is of another cluster.",
		[]string{"Compare `peerlane key show` on both hosts.", "Install the same release on both hosts."},
		"network.md#the-cluster-key"},

	{NICLeftOut, "RDMA does not use a NIC",
		"The NIC has no provider of rdma-core, no active port, no usable GID, or a protocol that relays do not speak.",
		[]string{"Run `ibv_devinfo -v`, and see the checks of NICs in `peerlane doctor`.",
			"On RoCE, give the port's network interface an address."}, "network.md#rdma"},
	{NotRegistered, "NICs do not reach GPU memory directly",
		"The memory is registered by nvidia-peermem or bounces through host memory. The warning has each refusal.",
		[]string{"Install a kernel and a driver with DMA-BUF.", "Run `modprobe nvidia-peermem`.",
			"Allocate clients' memory with gpuDirectRDMACapable."}, "network.md#whose-memory-nics-read-and-write"},
	{RDMAFailed, "RDMA with another relay failed",
		"Queue pairs failed, and the relays did not replace them within `verbs.reconnect_limit` (60 seconds by " +
			"default). " +
			"The error names host, NIC and the NIC's report.",
		[]string{"Connect again.", "See the checks port-state and error-counters of `peerlane doctor` on both hosts, " +
			"and " +
			"the switch."}, "network.md#faults-of-rdma"},
}
