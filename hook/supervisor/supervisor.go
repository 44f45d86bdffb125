package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"slices"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/hostnetwork"
	"github.com/peerlane/peerlane/hook/internal/admin"
	"github.com/peerlane/peerlane/hook/internal/cgroup"
	"github.com/peerlane/peerlane/hook/internal/handover"
	"github.com/peerlane/peerlane/hook/journal"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/hook/sandbox"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
)

// The supervisor restarts a failed relay after firstPause, which doubles with every failure. After
// maxFailures within failureInterval, the relay stays down.
const (
	firstPause      = 100 * time.Millisecond
	maxFailures     = 5
	failureInterval = time.Minute
)

// supervisor keeps the relay of one generation running. The goroutine of loop owns the state.
type supervisor struct {
	layout     paths.Layout
	generation *generation.Generation
	log        *logrus.Entry
	// bounded receives the log and the output of the relay.
	bounded               *boundedLog
	clients, peers, alive *os.File
	init                  *os.File
	// unit reports that this is a systemd service, which has its own control group.
	unit    bool
	limited cgroup.Limited

	// relay is nil while no process runs.
	relay *relay
	// failures are the times of the failures within failureInterval.
	failures []time.Time
	restart  *time.Timer
	status   generation.Status
	// held is the requested state without a relay: StateStopped, StateDrained, or empty.
	held string
	// insist fires when a stopped relay is overdue.
	insist *time.Timer
	// refusal answers in place of a relay; nil while a relay runs or is starting.
	refusal *refusal
	// inspecting are the requests that wait for the relay's report.
	inspecting []admin.Request
	tests      selfTests
	triples    tripleTests
	// networking is the network configuration of the relay.
	networking hostnetwork.Networking
	// keyError is the last error that logKeyError logged.
	keyError string
	// asked reports that the supervisor must end although the container runs.
	asked bool
}

// Supervise runs the supervisor of a generation: `peerlane-hook supervise`, which Launch starts
// with the descriptors of package handover. It returns when the container's init has ended and
// the generation is removed.
func Supervise(l paths.Layout, id string) error {
	if err := checkLockDescriptor(l, id, handover.FDAlive); err != nil {
		return fmt.Errorf("supervise generation %q: %w; only peerlane-hook create starts a supervisor", id, err)
	}
	for fd := handover.FDClients; fd <= handover.FDAlive; fd++ {
		unix.CloseOnExec(fd)
	}
	return supervise(l, id, false, handover.Descriptors{
		Clients: os.NewFile(handover.FDClients, "clients' socket"), Peers: os.NewFile(handover.FDPeers, "peers' socket"),
		Init: os.NewFile(handover.FDInit, "pidfd"), Started: os.NewFile(handover.FDStarted, "started pipe"),
		Admin: os.NewFile(
			handover.FDAdmin,
			"administration socket",
		), Alive: os.NewFile(handover.FDAlive, "supervisor's lock"),
	})
}

func supervise(l paths.Layout, id string, unit bool, d handover.Descriptors) error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, unix.SIGTERM)
	bounded := newBoundedLog(l, id)
	logrus.SetOutput(bounded)
	s := &supervisor{
		layout: l, log: logrus.WithField("generation", id), bounded: bounded, unit: unit,
		clients: d.Clients, peers: d.Peers, init: d.Init, alive: d.Alive,
		restart: time.NewTimer(0), insist: time.NewTimer(0),
	}
	s.restart.Stop()
	s.insist.Stop()
	requests, err := s.begin(id, d.Admin)
	if err != nil {
		_, writeErr := fmt.Fprint(d.Started, err)
		return errors.Join(err, writeErr)
	}
	s.limit()
	for _, sentence := range s.generation.Ignored {
		s.log.Warn(sentence)
	}
	answer := handover.Started
	if err := s.start(); err != nil {
		// A kill while the sandbox was set up does not fail the start: the supervisor tries again.
		if !errors.Is(err, sandbox.ErrSilent) {
			answer = err.Error()
		}
		// Launch ends this process if the hook is still waiting.
		s.failed(fmt.Sprintf("start the relay: %v", err))
	}
	_, _ = fmt.Fprint(d.Started, answer) // a hook that did not wait does not read the answer
	d.Started.Close()
	go func() {
		if _, err := collector.Collect(l); err != nil {
			s.log.WithError(err).Warn("removing the generations of ended containers")
		}
	}()
	return s.loop(requests, stop)
}

// limit sets the limits of the control group that the hook made. A systemd unit already has
// limits.
func (s *supervisor) limit() {
	group, ok, err := cgroup.Find(s.layout, s.generation.ID)
	if err == nil && ok {
		if _, statErr := os.Stat(group.Path()); statErr == nil {
			s.status.ControlGroup = true
			err = group.Limit(s.generation.Sandbox.Limits)
		}
	}
	if err != nil {
		s.log.WithError(err).Warn("the relay's control group lacks limits")
	}
	s.limited = cgroup.ReadLimited("/proc", s.generation.ID, s.unit)
}

// checkLockDescriptor checks that Launch started this process for this generation: the descriptor must be the
// generation's lock.
func checkLockDescriptor(l paths.Layout, id string, alive int) error {
	if !generation.IsID(id) {
		return errors.New("the generation is not 32 hexadecimal digits")
	}
	var lock, handed unix.Stat_t
	if err := unix.Stat(generation.SupervisorLock(l, id), &lock); err != nil {
		return &os.PathError{Op: "stat", Path: generation.SupervisorLock(l, id), Err: err}
	}
	if err := unix.Fstat(alive, &handed); err != nil {
		return fmt.Errorf("descriptor %d: %w", alive, err)
	}
	if lock.Dev != handed.Dev || lock.Ino != handed.Ino {
		return fmt.Errorf("descriptor %d is not %s", alive, generation.SupervisorLock(l, id))
	}
	return nil
}

// begin prepares the first relay. Launch reports its error.
func (s *supervisor) begin(id string, socket *os.File) (<-chan admin.Request, error) {
	generation, err := generation.Read(s.layout, id)
	if err != nil {
		return nil, err
	}
	s.generation = generation
	config.SetLogFormat(generation.LogFormat)
	s.log = s.log.WithField("container", generation.Container.ID)
	requests, err := admin.Listen(socket)
	if err != nil {
		return nil, err
	}
	return requests, nil
}

// loop is the supervisor's event loop.
func (s *supervisor) loop(requests <-chan admin.Request, stop <-chan os.Signal) error {
	init := int(s.init.Fd())
	initEnded := make(chan error, 1)
	go func() { initEnded <- process.WaitEnd(init) }()
	keys := time.NewTicker(keyInterval)
	defer keys.Stop()
	for {
		var answers chan launch.Status
		var exited chan error
		var overdue <-chan time.Time
		if s.relay != nil {
			answers, exited, overdue = s.relay.answers, s.relay.exited, s.relay.overdue.C
		}
		select {
		case err := <-initEnded:
			// An error has never been observed; a supervisor that cannot watch init must end too.
			return errors.Join(err, s.end())
		case <-stop:
			s.log.Info("received a stop request: ending the relay while the container is running")
			s.asked = true
			return s.end()
		case answer, ok := <-answers:
			if ok {
				s.answered(answer)
			} else {
				s.relay.answers = nil // the relay is ending; exited comes next
			}
		case err := <-exited:
			if process.Ended(init) { // the relay ended with its container
				s.ended(ending{err: err, container: true, held: s.held, killReason: s.relay.killReason})
				s.drop()
				return s.end()
			}
			s.exited(err)
		case <-s.insist.C:
			s.kill(fmt.Sprintf("the relay did not end within %v", process.EndTimeout))
		case <-overdue:
			s.kill(fmt.Sprintf("the relay did not answer its configuration within %v and was killed", answerTimeout))
		case <-s.restart.C:
			if err := s.start(); err != nil {
				s.failed(fmt.Sprintf("start the relay: %v", err))
			}
		case <-keys.C:
			s.checkKey()
		case r := <-requests:
			s.requested(r)
		case p := <-s.tests.found:
			s.testFound(p)
		case t := <-s.tests.done:
			s.testsDone(t)
		case t := <-s.triples.found:
			s.tripleFound(t)
		case err := <-s.triples.done:
			s.triplesDone(err)
		}
	}
}

// requested handles a request of the administrator or of a hook.
func (s *supervisor) requested(r admin.Request) {
	switch r.Command {
	case admin.Lanes:
		r.Reply(s.lanesChanged())
	case admin.Inspect:
		s.inspect(r)
	case admin.Stop:
		s.hold(generation.StateStopped)
		r.Reply(nil)
	case admin.Drain:
		s.hold(generation.StateDrained)
		r.Reply(nil)
	case admin.Resume:
		r.Reply(s.resume())
	default:
		r.Reply(
			fmt.Errorf(
				"unknown request %q: the supervisor is of an earlier release and speaks version %d of requests; "+
					"restart the container",
				r.Command,
				admin.Version,
			),
		)
	}
}

// inspect asks a ready relay for a report.
func (s *supervisor) inspect(r admin.Request) {
	if s.status.State == generation.StateReady {
		// Do not repeat a pending request.
		var err error
		s.inspecting = slices.DeleteFunc(s.inspecting, func(r admin.Request) bool { return time.Now().After(r.Late) })
		if !slices.Contains(s.relay.asked, launch.RequestReport) {
			err = s.relay.request(launch.Request{Request: launch.RequestReport})
		}
		if err == nil {
			s.inspecting = append(s.inspecting, r)
			return
		}
		s.log.WithError(err).Warn("asking the relay for a report")
	}
	r.Answer <- admin.Answer{Version: admin.Version, Supervisor: os.Getpid(), NoReport: "the relay is " + s.status.State}
}

// inspected answers the requests that wait for a report.
func (s *supervisor) inspected(report *launch.Report, why string) {
	for _, r := range s.inspecting {
		r.Answer <- admin.Answer{Version: admin.Version, Supervisor: os.Getpid(), Report: report, NoReport: why}
	}
	s.inspecting = nil
}

// hold ends the relay and prevents another start. A draining relay can be stopped, because a copy
// that never ends would block it for ever.
func (s *supervisor) hold(state string) {
	if s.held == generation.StateStopped || s.held == state {
		return
	}
	s.log.Infof("asked for %s", state)
	s.held = state
	s.restart.Stop()
	if s.tests.cancel != nil { // the tester has CUDA contexts
		s.tests.cancel()
	}
	if s.triples.cancel != nil {
		s.triples.cancel()
	}
	if s.relay == nil {
		s.rest()
		return
	}
	s.note(
		map[string]string{generation.StateStopped: generation.StateStopping,
			generation.StateDrained: generation.StateDraining}[state],
		s.status.Error,
	)
	reason := map[string]string{generation.StateStopped: "was stopped by the administrator",
		generation.StateDrained: "was drained by the administrator; attach again later"}[state]
	err := s.relay.request(launch.Request{Request: launch.RequestEnd, Reason: reason})
	if err != nil {
		s.log.WithError(err).Warn("asking the relay to end")
	}
	if err != nil || state == generation.StateStopped {
		s.insist.Reset(process.EndTimeout)
	}
}

// rest enters the requested state when no relay runs.
func (s *supervisor) rest() {
	if t, ended := s.endTests(); ended { // the administrator may unload the driver in this state
		s.testsDone(t)
	}
	s.note(s.held, s.status.Error)
	name := "the relay of container " + s.generation.Container.ID
	s.refuse(map[string]string{
		generation.StateStopped: name + " was stopped by the administrator; peerlane relay resume on the host starts it " +
			"again",
		generation.StateDrained: name + " was drained by the administrator; attach again later",
	}[s.held])
}

// refuse sends clients and peers a reason while no relay runs, so that they do not wait.
func (s *supervisor) refuse(reason string) {
	if err := s.refusal.end(); err != nil {
		s.log.WithError(err).Warn("leaving the sockets")
	}
	var err error
	if s.refusal, err = refuse(s.clients, s.peers, reason); err != nil {
		s.log.WithError(err).Error("answering clients; they wait")
	}
}

// resume starts a relay after hold, or after too many failures.
func (s *supervisor) resume() error {
	switch s.status.State {
	case generation.StateStopped, generation.StateDrained, generation.StateDown:
	case generation.StateStopping, generation.StateDraining:
		return fmt.Errorf("the relay is still %s; resume it afterwards", s.status.State)
	default:
		return nil // a relay is running or starting
	}
	drained, err := generation.AllDrained(s.layout)
	if err != nil {
		return err
	}
	if drained != nil {
		return &fault.Error{
			Code:      fault.Drained,
			Operation: "all relays of this host are drained",
			Remedy:    "run peerlane relay resume --all",
		}
	}
	s.held, s.failures = "", nil
	if err := s.start(); err != nil {
		s.failed(fmt.Sprintf("start the relay: %v", err))
		return err
	}
	return nil
}

// start starts a relay and sends the configuration, unless the relays of the host are drained.
func (s *supervisor) start() error {
	drained, err := generation.AllDrained(s.layout)
	if err != nil {
		s.log.WithError(err).Error("checking whether the host's relays are drained")
	}
	if drained != nil {
		s.hold(generation.StateDrained)
		return nil
	}
	if err := s.refusal.end(); err != nil {
		s.log.WithError(err).Warn("leaving the sockets")
	}
	s.refusal = nil
	s.selfTest()
	s.goOnNetwork()
	r, err := startRelay(s.generation, s.networking.Where, s.limited, s.clients, s.peers, s.init, s.bounded)
	if err != nil {
		return err
	}
	// Record the process before a client can connect: the sandbox may still be incomplete.
	s.relay = r
	s.status.Starts++
	s.status.Relay = &r.process
	if err := generation.RecordRelay(s.alive, r.process); err != nil {
		s.log.WithError(err).Error("recording the relay's process beside the uid")
	}
	s.note(generation.StateStarting, "")
	go admitClaims(s.layout, s.generation.ID, s.log, r)
	if err := r.waitExecuted(); err != nil {
		s.drop()
		return err
	}
	s.status.Sandbox = r.sandbox
	if r.sandbox != nil && s.status.Starts == 1 {
		for _, lacks := range r.sandbox.Missing {
			s.log.Warn(lacking(lacks))
		}
	}
	s.sendSecrets()
	s.configure()
	return nil
}

// answered handles the relay's answer to a configuration.
func (s *supervisor) answered(a launch.Status) {
	to, asked := s.relay.answered()
	if !asked {
		return // a relay can send answers at any rate
	}
	switch to {
	case launch.RequestReport:
		s.inspected(a.Report, a.Error)
		return
	case launch.RequestEnd:
		if !a.OK {
			s.log.Warnf("the relay refused to end: %s", a.Error)
			s.insist.Reset(time.Nanosecond)
		}
		return
	case launch.RequestSecrets:
		s.secretsAnswered(a)
		return
	}
	switch {
	case s.held != "" || s.relay.killReason != "":
	case a.OK:
		if s.status.State != generation.StateReady {
			s.log.Infof("relay %d is ready", s.relay.process.PID)
		}
		s.note(generation.StateReady, "")
	case s.status.State == generation.StateReady:
		// The relay keeps its previous lanes.
		s.log.Errorf("the relay refused the changed lanes: %s", a.Error)
		s.note(generation.StateReady, "the relay refused the changed lanes: "+a.Error)
	default:
		s.kill("the relay refused the configuration: " + a.Error)
	}
}

// kill kills a relay that is unusable. exited comes next.
func (s *supervisor) kill(reason string) {
	if err := s.relay.kill(reason); err != nil {
		s.log.WithError(err).Error("killing the relay")
	}
}

// exited handles the end of a relay while its container runs.
func (s *supervisor) exited(err error) {
	reason := s.relay.killReason
	cause, why := s.ended(ending{err: err, held: s.held, renew: s.relay.renew, killReason: reason})
	switch {
	case reason != "":
	case slices.Contains(telling, cause):
		reason = fmt.Sprintf("the relay died: %s: %s", cause, why)
	case err != nil:
		reason = fmt.Sprintf("the relay died: %v", err)
	default:
		reason = "the relay ended by itself while the container was running"
	}
	renew := s.relay.renew
	s.drop()
	s.insist.Stop()
	if renew && s.held == "" {
		if err := s.start(); err != nil {
			s.failed(fmt.Sprintf("start the relay: %v", err))
		}
		return
	}
	if s.held != "" {
		s.rest()
		return
	}
	s.failed(reason)
}

// drop releases the resources of an ended relay.
func (s *supervisor) drop() {
	s.relay.close()
	s.relay, s.status.Relay = nil, nil
	s.inspected(nil, "the relay has just ended")
}

// failed schedules the next start of a relay, or gives up.
func (s *supervisor) failed(reason string) {
	now := time.Now()
	s.failures = slices.DeleteFunc(s.failures, func(f time.Time) bool { return now.Sub(f) > failureInterval })
	s.failures = append(s.failures, now)
	if len(s.failures) < maxFailures {
		pause := firstPause << (len(s.failures) - 1)
		s.log.Errorf("%s; starting it again in %v", reason, pause)
		s.logToHost(journal.SeverityWarning, fmt.Sprintf("%s; starting it again in %v", reason, pause))
		s.note(generation.StateWaiting, reason)
		s.restart.Reset(pause)
		return
	}
	s.log.Errorf("%s; %d failures within %v: giving up", reason, maxFailures, failureInterval)
	down := &fault.Error{
		Code: fault.RelayDown,
		Operation: fmt.Sprintf(
			"the relay of container %s stays down after %d failures within %v",
			s.generation.Container.ID,
			maxFailures,
			failureInterval,
		),
		Cause: errors.New(
			reason,
		),
		Remedy: "read its log by peerlane relay inspect " + s.generation.ID + ", then run peerlane relay resume on the host",
	}
	s.logToHost(journal.SeverityError, down.Error())
	s.note(generation.StateDown, reason)
	s.refuse(down.Error())
}

// logToHost writes to the host's log, because the generation's log is removed with the container.
func (s *supervisor) logToHost(severity int, message string) {
	if err := journal.Write(s.layout, severity, s.generation.Container.ID, s.generation.ID, message); err != nil {
		s.log.WithError(err).Warn("writing to the host's log failed")
	}
}

// lanesChanged reads the generation again, and sends the lanes to the relay.
func (s *supervisor) lanesChanged() error {
	if s.status.State == generation.StateDown {
		return fmt.Errorf("the relay is down: %s", s.status.Error)
	}
	generation, err := generation.Read(s.layout, s.generation.ID)
	if err != nil {
		return err
	}
	s.generation = generation
	if s.relay == nil {
		return nil // the next relay gets the lanes
	}
	s.selfTest()
	if s.relay.sandbox != nil && !slices.Equal(s.relay.devices, confinement(generation, nil, s.limited).Devices) {
		// The devices of a sandbox cannot change. Only a hook adds lanes, so no client has
		// connected yet.
		s.log.Info("the relay's sandbox lacks devices of the added lane: restarting the relay")
		s.relay.renew = true
		s.insist.Reset(process.EndTimeout)
		return os.NewSyscallError("kill", s.relay.cmd.Process.Signal(unix.SIGTERM))
	}
	s.configure()
	return nil
}

// relayConfig returns the generation's configuration with the network that this supervisor has found.
func (s *supervisor) relayConfig() launch.Config {
	config := s.generation.Config
	config.Network, config.NoNetwork = s.networking.Where, s.networking.Why
	if config.Scope == launch.ScopeAuto { // relays of earlier releases do not know auto
		config.Scope = map[bool]string{true: launch.ScopeHost, false: launch.ScopeCluster}[config.Local()]
	}
	return config
}

// configure sends the configuration to the relay.
func (s *supervisor) configure() {
	s.writeTopology()
	config := s.relayConfig()
	// This supervisor answers claims and reads reports of ends, even if the generation is of an
	// earlier release.
	config.Admission, config.HostAdmission, config.Endings = true, true, true
	if err := s.relay.configure(s.knowing(hostnetwork.LimitAddresses(config))); err != nil {
		// The relay has closed the socket and is ending; the next relay gets the configuration.
		s.log.WithError(err).Warn("sending the configuration to the relay")
	}
}

// note records the status of the relay.
func (s *supervisor) note(state, reason string) {
	s.status.State, s.status.Error = state, reason
	if err := generation.WriteJSON(generation.StatusFile(s.layout, s.generation.ID), s.status); err != nil {
		s.log.WithError(err).Error("writing the status")
	}
}

// end ends the relay, removes the generation, and collects the generations of ended containers.
func (s *supervisor) end() error {
	s.note(generation.StateEnding, s.status.Error)
	s.endTests()
	var errs []error
	if s.relay != nil {
		gone, err := s.relay.end()
		if errs = append(errs, err); gone != nil {
			s.ended(ending{err: *gone, container: !s.asked, asked: s.asked, killReason: s.relay.killReason})
			s.status.Relay = nil // otherwise the generation remains until the relay has ended
		}
		s.relay = nil
		s.note(
			generation.StateEnding,
			s.status.Error,
		) // if the rest fails, Collect must not report the end of the relay again
	}
	group, ok, err := cgroup.Find(s.layout, s.generation.ID)
	if err == nil && ok {
		err = group.Leave()
	}
	if err != nil {
		// Removing the group would kill this supervisor: leave that to Collect.
		return errors.Join(append(errs, fmt.Errorf("leave the control group: %w", err))...)
	}
	held, err := generation.LockGeneration(s.layout, s.generation.ID, generation.LockTimeout)
	switch {
	case err == nil:
		defer held.Close()
	case errors.Is(err, fs.ErrNotExist): // an administrator deleted the directory, but not the other files
	default:
		return errors.Join(append(errs, err)...)
	}
	errs = append(errs, collector.Remove(s.layout, s.generation.ID))
	if errors.Join(errs...) == nil { // the relay is reaped, and the control group is empty
		errs = append(errs, s.generation.ReleaseUID(s.layout, s.alive))
	}
	// No relay starts any more. Collect handles a relay that may still run.
	errs = append(errs, s.alive.Close())
	_, err = collector.Collect(s.layout)
	return errors.Join(append(errs, err, s.generation.ReturnUID(s.layout))...)
}
