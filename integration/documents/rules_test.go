package documents

import "regexp"

// sections are where messages are explained in docs/troubleshooting.md. The first rule
// that fits a message, by its package and by its text, has it. A package that is new here
// needs a rule, and what it says a place in its section.
var sections = compiled([]struct{ section, at, text string }{
	// By what it says, whoever says it.
	{"Cluster key", `.`, `cluster key|cluster\.key|peerlane key|rotation|[Tt]he secret |it is no cluster key|current and its previous key|last line has no end|it is not written as|an id, a date and a secret|its form is …, and this version|is no date such as|lines of keys|names keys`},
	{"Files that others can change", `^(config/paths|cmd/peerlane-runtime)$`, `belongs to uid|can be written by others|open to others|is no regular file|to be a directory|grows while|at most … are possible|is no program \(`},
	{"Two hosts' doctors", `^cmd/peerlane(/doctor/meeting)?$`, `doctor|facts|clock|1 MiB each way|its name is not found|is no port`},
	{"Two hosts' doctors", `^cmd/peerlane/doctor$`, `network\.`},
	{"Pairs of GPUs", `^(hook|relay|relay/launch|relay/selftest|cmd/peerlane|cmd/peerlane-relay)$`, `self-test|[Pp]airs? of GPUs|pair …|stage on this pair|a pair takes two|what to test|verdict|a rate of|not tested|a reason of|numbers beyond|are there twice|a chunk of|it has … pairs|streams and a depth|with the UUID`},
	{"Pairs of GPUs", `^relay/selftest$`, `.`},
	{"Staging memory", `^(hook|relay|relay/client|relay/device|cmd/peerlane-relay)$`, `[Ss]taging|bounces? through|to stage (on|for)|slots of GPU|short messages of GPU|asked for on GPU|more of it would be|not admitted|room for the slots`},
	{"Configuration", `^config$`, `.`},
	{"Configuration", `^topo$`, `^(plan\.|groups\.|gdr\.nics|staging\.gpus|servers:|nics:|neither servers nor nics|no nics are given|rules …|kind is|GPU … already has|GPU … cannot serve|GPU … is named twice|a pair has two|both are one GPU|member |after its last member|no GPU near)`},

	// Of command lines.
	{"Command lines", `^cmd/peerlane$`, `^(could not tell|failures|warnings|not everything was measured|the demo ran|NVML does not name|everybody who reaches|listening at)`},
	{"Specifications", `^cmd/peerlane$`, `installed does not fit|offers no device|engines ignore`},
	{"A relay has ended", `^cmd/peerlane$`, `the relay of container|not … after|state of relays`},
	{"Network", `^cmd/peerlane$`, `^network\.`},
	{"Command lines", `^cmd/peerlane(-hook)?$`, `.`},
	{"Engines and peerlane-runtime", `^cmd/peerlane-runtime$`, `.`},
	{"Command lines", `^cmd/peerlane/(doctor|exporter)$`, `.`},
	{"Command lines", `^cmd/peerlane-relay$`, `^--|^descriptor|emulated NIC`},
	{"A relay does not start", `^cmd/peerlane-relay$`, `.`},

	{"Topology and plan", `^topo(/.*)?$`, `.`},
	{"Engines and peerlane-runtime", `^cdi/(engine|inject)(/.*)?$`, `.`},
	{"Specifications", `^cdi$`, `.`},
	{"A relay does not start", `^hook/sandbox$`, `.`},

	// Of the hook and the supervisor.
	{"A container does not start", `^config/paths$`, `anchor|mount|tmpfs|making it private`},
	{"Specifications", `^hook$`, `no plan|so that the CDI specification|of the plan is|that GPU (cannot|is at)|the plan …|no GPU of the plan|a lane is named as|lane …:|… says …$|NVIDIA is`},
	{"A relay does not start", `^hook$`, `control group|the service|systemd`},
	{"A relay has ended", `^hook$`, `end even by|did not end|has left|drained|resume|its relay is|killing|supervisor has been killed|removing|collect|not end for asking|giving back|no oom_kill|asking the relay|no relay's|relay … has ended|ended containers|anchor …: …$`},
	{"Network", `^hook$`, `network`},
	{"A container does not start", `^hook$`, `container|mount|anchor|root file system|annotation|hide|locked memory|peerlane\.dev|a key is there twice|more than … bytes|no root file system|config\.json|there is more after it|process …|process has ended|the root|identifying|this needs (CAP_SYS_ADMIN|Linux 5)|limit of open files`},
	{"A relay does not start", `^hook$`, `.`},

	// Of the data path.
	{"Pairs of GPUs", `^relay/launch$`, `^(it has|it is of version|line|reading|there is more|pair|GPU)`},
	{"A relay does not start", `^relay/launch$`, `.`},
	{"Network", `^relay/network(/.*)?$`, `.`},
	{"RDMA", `^relay/(verbs|transport/verbs|registration|rdmatest)$`, `.`},
	{"RDMA", `^relay$`, `RDMA|nvidia-peermem|for slots|server GPU for this lane|DMA-BUF|lent|near the NICs|not near to`},
	{"What should not be", `^relay/transport/tcp$`, `frame of|bytes on a data stream|grant …|region …|with a descriptor|not the host's|cannot be granted|leaves more than`},
	{"Network", `^relay/transport/tcp$`, `.`},
	{"Emulated NIC", `^relay/transport/loop$`, `.`},
	{"What should not be", `^relay/(wire|packet|ring|poll|transport/local)$`, `.`},
	{"GPUs and CUDA", `^(cuda|relay/device)$`, `.`},
	{"C library", `^relay/libpeerlane/source$`, `.`},
	{"NCCL plugin", `^relay/nccl/source$`, `.`},
	{"What should not be", `^(relay/(libpeerlane|nccl)|cmd/version)$`, `.`},
	{"What a client is told", `^relay/client$`, `.`},
	{"Emulated NIC", `^relay$`, `emulated NIC`},
	{"A relay has ended", `^relay$`, `^the relay of … (died|was stopped|ends|…$)|cannot be given back|is ending|^… ended$|supervis|has ended: its relay|ended the connection|^… closed|last copies|left the connection`},
	{"What should not be", `^relay$`, `^the relay of … |^the NIC of|of the other container|unmapping|closing|makes? no sense|the transport has no windows|hello|announced more than|^a … is no|stream …|with … descriptors|which this version|answered with|no memory is shared|no descriptor is taken|more of such warnings|could not be watched|cannot watch`},
	{"Network", `^relay$`, `other hosts?|network|the relay at|on another host|senders? connected|sets of connections|answers a sender`},
	{"GPUs and CUDA", `^relay$`, `CUDA driver|driver does not|the GPU at|copying|copies of GPU|seen after|failed: …|GPU …: …|lane of …: …|memory of … cannot be mapped`},
	{"What a client is told", `^relay$`, `.`},
})

// rule says where messages of some packages with some texts are explained.
type rule struct {
	section  string
	at, text *regexp.Regexp
}

func compiled(list []struct{ section, at, text string }) (rules []rule) {
	for _, r := range list {
		rules = append(rules, rule{r.section, regexp.MustCompile(r.at), regexp.MustCompile(r.text)})
	}
	return rules
}
