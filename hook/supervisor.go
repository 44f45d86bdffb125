package hook

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
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
)

// Descriptors of a supervisor at its start. Standard error is the
// generation's log.
const (
	fdClients = 3 // listening socket of the clients
	fdPeers   = 4 // listening socket of the peer relays
	fdInit    = 5 // pidfd of the container's init
	fdStarted = 6 // pipe on which Launch waits for startedAnswer, or an error
	fdAdmin   = 7 // listening socket of the administration
	fdAlive   = 8 // locked file; the lock ends with the supervisor
)

const startedAnswer = "started"

// descriptors are what a supervisor works on, wherever it has them from.
type descriptors struct{ clients, peers, init, started, admin, alive *os.File }

// A relay that fails is started again after firstPause, which doubles with
// each failure; maxFailures within failureTime, and it stays down.
const (
	firstPause  = 100 * time.Millisecond
	maxFailures = 5
	failureTime = time.Minute
)

// supervisor keeps one generation's relay running. All its state belongs to
// the goroutine of loop.
type supervisor struct {
	layout                paths.Layout
	generation            *Generation
	log                   *logrus.Entry
	bounded               *boundedLog // where log goes, and what relays say
	clients, peers, alive *os.File
	init                  *os.File
	unit                  bool // it is a service of systemd, and so is its control group
	limited               bool // by pids.max of its control group, which its relay is in

	relay    *relay      // nil while none runs
	failures []time.Time // of the last failureTime
	restart  *time.Timer
	status   Status
	// held is the state without a relay that somebody has asked for, StateStopped
	// or StateDrained; empty while one shall run.
	held string
	// insist fires when a relay that was stopped should have ended.
	insist *time.Timer
	// refusal answers in place of a relay; nil while one does, or soon will.
	refusal *refusal
	// inspecting are the requests that wait for the relay's report.
	inspecting []request
	tests      selfTests
	triples    tripleTests
	// networking is what the relay was told at its start, or since.
	networking networking
	keyError   string // what was complained of last; see complain
	asked      bool   // to end, although the container lives
}

// Supervise is the supervisor of a generation: `peerlane-hook supervise`, run
// by Launch with the descriptors above. It returns when the container's init
// has ended and everything of the generation is gone.
func Supervise(l paths.Layout, id string) error {
	if err := handed(l, id, fdAlive); err != nil {
		return fmt.Errorf("supervising generation %q: %w; only peerlane-hook create starts a supervisor", id, err)
	}
	for fd := fdClients; fd <= fdAlive; fd++ {
		unix.CloseOnExec(fd)
	}
	return supervise(l, id, false, descriptors{
		clients: os.NewFile(fdClients, "clients' socket"), peers: os.NewFile(fdPeers, "peers' socket"),
		init: os.NewFile(fdInit, "pidfd"), started: os.NewFile(fdStarted, "started pipe"),
		admin: os.NewFile(fdAdmin, "administration socket"), alive: os.NewFile(fdAlive, "supervisor's lock"),
	})
}

func supervise(l paths.Layout, id string, unit bool, d descriptors) error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, unix.SIGTERM)
	bounded := newBoundedLog(l, id)
	logrus.SetOutput(bounded)
	s := &supervisor{
		layout: l, log: logrus.WithField("generation", id), bounded: bounded, unit: unit,
		clients: d.clients, peers: d.peers, init: d.init, alive: d.alive,
		restart: time.NewTimer(0), insist: time.NewTimer(0),
	}
	s.restart.Stop()
	s.insist.Stop()
	requests, err := s.begin(id, d.admin)
	if err != nil {
		_, tell := fmt.Fprint(d.started, err)
		return errors.Join(err, tell)
	}
	s.limit()
	for _, sentence := range s.generation.Ignored {
		s.log.Warn(sentence)
	}
	answer := startedAnswer
	if err := s.start(); err != nil {
		// Of what was killed no start fails: there is a next one.
		if !errors.Is(err, errSilent) {
			answer = err.Error()
		}
		// Launch ends this process; but a hook may not have waited.
		s.failed(fmt.Sprintf("starting the relay: %v", err))
	}
	_, _ = fmt.Fprint(d.started, answer) // nobody reads it where the hook has not waited
	d.started.Close()
	go func() {
		if _, err := Collect(l); err != nil {
			s.log.WithError(err).Warn("removing what ended containers have left")
		}
	}()
	return s.loop(requests, stop)
}

// limit sets the limits of the control group that the hook has made. A unit of
// systemd brings its own.
func (s *supervisor) limit() {
	group, ok, err := findCgroup(s.layout, s.generation.ID)
	if err == nil && ok {
		if _, is := os.Stat(group.path()); is == nil {
			err = group.limit(s.generation.Sandbox.Limits)
		}
	}
	if err != nil {
		s.log.WithError(err).Warn("the relay's control group has not all of its limits")
	}
	s.limited = limitsTasks("/proc", s.generation.ID, s.unit)
}

// handed checks that Launch handed this generation to this process: a descriptor
// is of its lock.
func handed(l paths.Layout, id string, alive int) error {
	if !isID(id) {
		return errors.New("that is not 32 hexadecimal digits")
	}
	var lock, handed unix.Stat_t
	if err := unix.Stat(supervisorLock(l, id), &lock); err != nil {
		return &os.PathError{Op: "stat", Path: supervisorLock(l, id), Err: err}
	}
	if err := unix.Fstat(alive, &handed); err != nil {
		return fmt.Errorf("descriptor %d: %w", alive, err)
	}
	if lock.Dev != handed.Dev || lock.Ino != handed.Ino {
		return fmt.Errorf("descriptor %d is not %s", alive, supervisorLock(l, id))
	}
	return nil
}

// begin makes ready for the first relay. An error of it is Launch's.
func (s *supervisor) begin(id string, admin *os.File) (<-chan request, error) {
	generation, err := readGeneration(s.layout, id)
	if err != nil {
		return nil, err
	}
	s.generation = generation
	config.SetLogFormat(generation.LogFormat)
	s.log = s.log.WithField("container", generation.Container.ID)
	requests, err := listenAdmin(admin)
	if err != nil {
		return nil, err
	}
	return requests, nil
}

// loop is the life of the supervisor.
func (s *supervisor) loop(requests <-chan request, stop <-chan os.Signal) error {
	init := int(s.init.Fd())
	initEnded := make(chan error, 1)
	go func() { initEnded <- waitEnd(init) }()
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
			// An error was never seen; but who cannot watch must not stay.
			return errors.Join(err, s.end())
		case <-stop:
			s.log.Info("asked to stop: ending the relay, although the container lives")
			s.asked = true
			return s.end()
		case answer, ok := <-answers:
			if ok {
				s.answered(answer)
			} else {
				s.relay.answers = nil // it is ending; exited comes next
			}
		case err := <-exited:
			if ended(init) { // as it should
				s.ended(ending{err: err, container: true, held: s.held, killReason: s.relay.killReason})
				s.drop()
				return s.end()
			}
			s.exited(err)
		case <-s.insist.C:
			s.kill(fmt.Sprintf("it did not end within %v", endTimeout))
		case <-overdue:
			s.kill(fmt.Sprintf("the relay has not answered its configuration within %v and was killed", answerTimeout))
		case <-s.restart.C:
			if err := s.start(); err != nil {
				s.failed(fmt.Sprintf("starting the relay: %v", err))
			}
		case <-keys.C:
			s.lookAtKey()
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

// requested does what the administrator, or a hook, asks for.
func (s *supervisor) requested(r request) {
	switch r.command {
	case commandLanes:
		r.reply(s.lanesChanged())
	case commandInspect:
		s.inspect(r)
	case commandStop:
		s.hold(StateStopped)
		r.reply(nil)
	case commandDrain:
		s.hold(StateDrained)
		r.reply(nil)
	case commandResume:
		r.reply(s.resume())
	default:
		r.reply(fmt.Errorf("its supervisor is of an earlier release of Peerlane, which does not know %q; restart the container", r.command))
	}
}

// inspect asks the relay, if there is one that answers.
func (s *supervisor) inspect(r request) {
	if s.status.State == StateReady {
		// One that does not answer is not asked again.
		var err error
		s.inspecting = slices.DeleteFunc(s.inspecting, func(r request) bool { return time.Now().After(r.late) })
		if !slices.Contains(s.relay.asked, launch.RequestReport) {
			err = s.relay.request(launch.Request{Request: launch.RequestReport})
		}
		if err == nil {
			s.inspecting = append(s.inspecting, r)
			return
		}
		s.log.WithError(err).Warn("asking the relay for a report")
	}
	r.answer <- adminAnswer{Version: adminVersion, Supervisor: os.Getpid(), NoReport: "the relay is " + s.status.State}
}

// inspected answers those who wait for a report.
func (s *supervisor) inspected(report *launch.Report, why string) {
	for _, r := range s.inspecting {
		r.answer <- adminAnswer{Version: adminVersion, Supervisor: os.Getpid(), Report: report, NoReport: why}
	}
	s.inspecting = nil
}

// hold ends the relay and has none started. What is drained can be stopped: a
// copy that never ends would hold it for ever.
func (s *supervisor) hold(state string) {
	if s.held == StateStopped || s.held == state {
		return
	}
	s.log.Infof("asked for %s", state)
	s.held = state
	s.restart.Stop()
	if s.tests.cancel != nil { // it has contexts of its own
		s.tests.cancel()
	}
	if s.triples.cancel != nil {
		s.triples.cancel()
	}
	if s.relay == nil {
		s.rest()
		return
	}
	s.note(map[string]string{StateStopped: StateStopping, StateDrained: StateDraining}[state], s.status.Error)
	reason := map[string]string{StateStopped: "was stopped by the administrator", StateDrained: "was drained by the administrator; attach again later"}[state]
	err := s.relay.request(launch.Request{Request: launch.RequestEnd, Reason: reason})
	if err != nil {
		s.log.WithError(err).Warn("asking the relay to end")
	}
	if err != nil || state == StateStopped {
		s.insist.Reset(endTimeout)
	}
}

// rest is the state without a relay that was asked for.
func (s *supervisor) rest() {
	if t, ended := s.endTests(); ended { // whoever hears of this state may unload the driver
		s.testsDone(t)
	}
	s.note(s.held, s.status.Error)
	name := "the relay of container " + s.generation.Container.ID
	s.refuse(map[string]string{
		StateStopped: name + " was stopped by the administrator; peerlane relay resume on the host starts it again",
		StateDrained: name + " was drained by the administrator; attach again later",
	}[s.held])
}

// refuse answers clients and peers while there is no relay: they are told why,
// and do not wait.
func (s *supervisor) refuse(reason string) {
	if err := s.refusal.end(); err != nil {
		s.log.WithError(err).Warn("leaving the sockets")
	}
	var err error
	if s.refusal, err = refuse(s.clients, s.peers, reason); err != nil {
		s.log.WithError(err).Error("answering clients; they wait")
	}
}

// resume starts a relay after hold, or after it has given up.
func (s *supervisor) resume() error {
	switch s.status.State {
	case StateStopped, StateDrained, StateDown:
	case StateStopping, StateDraining:
		return fmt.Errorf("its relay is %s still; resume it when that has ended", s.status.State)
	default:
		return nil // it runs, or will
	}
	drained, err := AllDrained(s.layout)
	if err != nil {
		return err
	}
	if drained != nil {
		return &fault.Error{Code: fault.Drained, Operation: "all relays of this host are drained", Remedy: "run peerlane relay resume --all"}
	}
	s.held, s.failures = "", nil
	if err := s.start(); err != nil {
		s.failed(fmt.Sprintf("starting the relay: %v", err))
		return err
	}
	return nil
}

// start starts a relay and sends it its configuration, unless all relays of the
// host are drained.
func (s *supervisor) start() error {
	drained, err := AllDrained(s.layout)
	if err != nil {
		s.log.WithError(err).Error("looking whether all relays are drained")
	}
	if drained != nil {
		s.hold(StateDrained)
		return nil
	}
	if err := s.refusal.end(); err != nil {
		s.log.WithError(err).Warn("leaving the sockets")
	}
	s.refusal = nil
	s.selfTest()
	s.goOnNetwork()
	r, err := startRelay(s.generation, s.networking.where, s.limited, s.clients, s.peers, s.init, s.bounded)
	if err != nil {
		return err
	}
	// Written down before anybody can meet it: what is to become the relay makes its
	// sandbox still.
	s.relay = r
	s.status.Starts++
	s.status.Relay = &r.process
	if err := recordRelay(s.alive, r.process); err != nil {
		s.log.WithError(err).Error("writing down the relay's process beside its uid")
	}
	s.note(StateStarting, "")
	go admitClaims(s.layout, s.generation.ID, s.log, r)
	if err := r.executed(); err != nil {
		s.drop()
		return err
	}
	s.status.Sandbox = r.sandbox
	if r.sandbox != nil && s.status.Starts == 1 {
		for _, lacks := range r.sandbox.Missing {
			s.log.Warnf("the relay's sandbox lacks %s", lacks)
		}
	}
	s.tellSecrets()
	s.configure()
	return nil
}

// answered handles the relay's word on a configuration.
func (s *supervisor) answered(a launch.Status) {
	to, asked := s.relay.answered()
	if !asked {
		return // a relay may say so as often as it likes
	}
	switch to {
	case launch.RequestReport:
		s.inspected(a.Report, a.Error)
		return
	case launch.RequestEnd:
		if !a.OK {
			s.log.Warnf("the relay does not end for asking: %s", a.Error)
			s.insist.Reset(time.Nanosecond)
		}
		return
	case launch.RequestSecrets:
		s.toldSecrets(a)
		return
	}
	switch {
	case s.held != "" || s.relay.killReason != "":
	case a.OK:
		s.log.Infof("relay %d is ready", s.relay.process.PID)
		s.note(StateReady, "")
	case s.status.State == StateReady:
		// It goes on with the lanes that it had.
		s.log.Errorf("the relay refuses its changed lanes: %s", a.Error)
		s.note(StateReady, "the relay refuses its changed lanes: "+a.Error)
	default:
		s.kill("the relay refuses its configuration: " + a.Error)
	}
}

// kill ends a relay that is of no use; exited comes next.
func (s *supervisor) kill(reason string) {
	if err := s.relay.kill(reason); err != nil {
		s.log.WithError(err).Error("killing the relay")
	}
}

// exited handles the end of a relay whose container lives.
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
		reason = "the relay ended by itself, although the container lives"
	}
	renew := s.relay.renew
	s.drop()
	s.insist.Stop()
	if renew && s.held == "" {
		if err := s.start(); err != nil {
			s.failed(fmt.Sprintf("starting the relay: %v", err))
		}
		return
	}
	if s.held != "" {
		s.rest()
		return
	}
	s.failed(reason)
}

// drop forgets a relay that has ended.
func (s *supervisor) drop() {
	s.relay.close()
	s.relay, s.status.Relay = nil, nil
	s.inspected(nil, "the relay has just ended")
}

// failed starts the next relay a little later, or not at all.
func (s *supervisor) failed(reason string) {
	now := time.Now()
	s.failures = slices.DeleteFunc(s.failures, func(f time.Time) bool { return now.Sub(f) > failureTime })
	s.failures = append(s.failures, now)
	if len(s.failures) < maxFailures {
		pause := firstPause << (len(s.failures) - 1)
		s.log.Errorf("%s; starting it again in %v", reason, pause)
		s.tell(SeverityWarning, fmt.Sprintf("%s; starting it again in %v", reason, pause))
		s.note(StateWaiting, reason)
		s.restart.Reset(pause)
		return
	}
	s.log.Errorf("%s; %d failures within %v: giving up", reason, maxFailures, failureTime)
	down := &fault.Error{Code: fault.RelayDown, Operation: fmt.Sprintf("the relay of container %s stays down after %d failures within %v", s.generation.Container.ID, maxFailures, failureTime),
		Cause: errors.New(reason), Remedy: "read its log by peerlane relay inspect " + s.generation.ID + ", then run peerlane relay resume on the host"}
	s.tell(SeverityError, down.Error())
	s.note(StateDown, reason)
	s.refuse(down.Error())
}

// tell writes to the host's log: the generation's goes with its container.
func (s *supervisor) tell(severity int, message string) {
	if err := Tell(s.layout, severity, s.generation.Container.ID, s.generation.ID, message); err != nil {
		s.log.WithError(err).Warn("the host's log has not taken it")
	}
}

// lanesChanged reads the generation again and tells the relay.
func (s *supervisor) lanesChanged() error {
	if s.status.State == StateDown {
		return fmt.Errorf("its relay is down: %s", s.status.Error)
	}
	generation, err := readGeneration(s.layout, s.generation.ID)
	if err != nil {
		return err
	}
	s.generation = generation
	if s.relay == nil {
		return nil // the next one gets it
	}
	s.selfTest()
	if s.relay.sandbox != nil && !slices.Equal(s.relay.devices, generation.confinement(nil).Devices) {
		// What it has is for good. A hook adds lanes, so no client has come yet.
		s.log.Info("the added lane has devices that the relay's sandbox has not: starting it anew")
		s.relay.renew = true
		s.insist.Reset(endTimeout)
		return os.NewSyscallError("kill", s.relay.cmd.Process.Signal(unix.SIGTERM))
	}
	s.configure()
	return nil
}

// told is the generation's configuration with the network that this supervisor has found.
func (s *supervisor) told() launch.Config {
	config := s.generation.Config
	config.Network, config.NoNetwork = s.networking.where, s.networking.why
	if config.Scope == launch.ScopeAuto { // which relays of earlier releases do not know
		config.Scope = map[bool]string{true: launch.ScopeHost, false: launch.ScopeCluster}[config.Local()]
	}
	return config
}

// configure sends the relay what it has to know.
func (s *supervisor) configure() {
	s.writeTopology()
	config := s.told()
	config.Admission, config.HostAdmission, config.Endings = true, true, true // this supervisor answers claims and hears ends, whoever made the generation
	if err := s.relay.configure(s.knowing(fitting(config))); err != nil {
		// It has closed its end, so it is ending, and the next one gets it.
		s.log.WithError(err).Warn("sending the relay its configuration")
	}
}

// note writes down what has become of the relay.
func (s *supervisor) note(state, reason string) {
	s.status.State, s.status.Error = state, reason
	if err := writeJSON(statusFile(s.layout, s.generation.ID), s.status); err != nil {
		s.log.WithError(err).Error("writing the status")
	}
}

// end ends the relay and removes the generation, and whatever other
// generations have been left behind.
func (s *supervisor) end() error {
	s.note(StateEnding, s.status.Error)
	s.endTests()
	var errs []error
	if s.relay != nil {
		gone, err := s.relay.end()
		if errs = append(errs, err); gone != nil {
			s.ended(ending{err: *gone, container: !s.asked, asked: s.asked, killReason: s.relay.killReason})
			s.status.Relay = nil // else the generation stays until it has ended
		}
		s.relay = nil
		s.note(StateEnding, s.status.Error) // where the rest fails Collect says nothing of a relay whose end is told
	}
	group, ok, err := findCgroup(s.layout, s.generation.ID)
	if err == nil && ok {
		err = group.leave()
	}
	if err != nil {
		// Removing the group would now end the supervisor itself. Collect can.
		return errors.Join(append(errs, fmt.Errorf("leaving the control group: %w", err))...)
	}
	held, err := lockGeneration(s.layout, s.generation.ID, lockTimeout)
	switch {
	case err == nil:
		defer held.Close()
	case errors.Is(err, fs.ErrNotExist): // somebody has deleted the state, and not the rest
	default:
		return errors.Join(append(errs, err)...)
	}
	errs = append(errs, remove(s.layout, s.generation.ID))
	if errors.Join(errs...) == nil { // the relay is reaped, and its group is empty
		errs = append(errs, s.generation.releaseUID(s.layout, s.alive))
	}
	// No relay is started any more; where this one may live, Collect looks at it.
	errs = append(errs, s.alive.Close())
	_, err = Collect(s.layout)
	return errors.Join(append(errs, err, s.generation.returnUID(s.layout))...)
}
