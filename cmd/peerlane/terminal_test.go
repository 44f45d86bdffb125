package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/cmd/peerlane/bench"
	"github.com/peerlane/peerlane/cmd/peerlane/demo"
	"github.com/peerlane/peerlane/cmd/peerlane/doctor"
	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/planner"
)

// hostileText contains ESC, OSC with BEL, CSI as C1, a line feed, a bidirectional override, and
// invalid UTF-8.
const hostileText = "evil\x1b[2J\x1b]0;t\x07\u009b2J\nforged\u202e\xff"

// wantClean requires lines without characters that control a terminal.
func wantClean(t *testing.T, what, text string) {
	t.Helper()
	if !strings.Contains(text, "evil") {
		t.Errorf("%s: nothing hostile in %q", what, text)
	}
	if !utf8.ValidString(text) {
		t.Errorf("%s: no UTF-8: %q", what, text)
	}
	for line := range strings.SplitSeq(text, "\n") {
		if strings.HasPrefix(line, "forged") || strings.ContainsFunc(line, func(r rune) bool {
			return unicode.IsControl(r) || unicode.In(r, unicode.Cf)
		}) {
			t.Errorf("%s: the terminal gets %q", what, line)
		}
	}
}

// poison sets every text that v reaches to hostileText, and fills pointers and lists.
func poison(v reflect.Value, depth int) {
	if depth > 8 || !v.CanSet() {
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(hostileText)
	case reflect.Pointer:
		if v.Type().Elem().Kind() == reflect.Struct || v.Type().Elem().Kind() == reflect.String {
			v.Set(reflect.New(v.Type().Elem()))
			poison(v.Elem(), depth+1)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fallthrough
	case reflect.Array:
		for i := range v.Len() {
			poison(v.Index(i), depth+1)
		}
	case reflect.Map:
		if v.Type().Key().Kind() == reflect.String {
			v.Set(reflect.MakeMap(v.Type()))
			value := reflect.New(v.Type().Elem()).Elem()
			poison(value, depth+1)
			v.SetMapIndex(reflect.ValueOf(hostileText).Convert(v.Type().Key()), value)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			poison(v.Field(i), depth+1)
		}
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		if v.Type() == reflect.TypeFor[time.Duration]() || v.Type().Name() == "int" {
			v.SetInt(2)
		}
	case reflect.Uint64:
		v.SetUint(2)
	case reflect.Float64:
		v.SetFloat(2)
	}
}

func poisoned[T any]() T {
	var v T
	poison(reflect.ValueOf(&v).Elem(), 0)
	return v
}

func TestEveryTableSanitisesItsCells(t *testing.T) {
	for name, print := range map[string]func(a *app){
		"relay list": func(a *app) {
			a.out.Println(a.relayTable([]generation.Info{poisoned[generation.Info]()}, formWide).Render())
		},
		"relay inspect": func(a *app) { a.printInspection(poisoned[control.Inspection]()) },
		"relay drain":   func(a *app) { a.printHolders([]control.Holder{poisoned[control.Holder]()}, true) },
		"relay top": func(a *app) {
			_, _ = io.WriteString(a.out.Document(), a.topText([]control.Rates{poisoned[control.Rates](),
				{Container: hostileText, Seconds: 1, Lanes: poisoned[[]control.Rate](),
					Connections: poisoned[[]control.Rate]()}}, true))
		},
		"topo":        func(a *app) { a.section(hostileText, a.gpuTable(poisoned[[]topo.GPU]())) },
		"topo, NICs":  func(a *app) { a.section(hostileText, a.nicTable(poisoned[[]topo.NIC]())) },
		"topo --nics": func(a *app) { h := poisoned[topo.Host](); a.printNICs(&h) },
		"notes":       func(a *app) { h := poisoned[topo.Host](); a.printNotes(append(reasons(&h), h.Notes...)) },
		"plan":        func(a *app) { p := poisoned[planner.Plan](); a.printPlan(&p, formWide) },
		"doctor":      func(a *app) { a.printDoctor(doctorReport{Findings: poisoned[[]doctor.Finding]()}) },
		"self-test":   func(a *app) { a.printSelfTest(poisoned[selfTestReport]()) },
		"cdi list": func(a *app) {
			d := poisoned[[]cdi.Device]()
			a.out.Println(a.deviceTable(d).Render())
			a.printDevices(d)
		},
		"cdi refresh": func(a *app) { a.printRefreshed(poisoned[refreshed]()) },
		"cdi diff":    func(a *app) { a.printDiffs([]cdi.Change{{Path: hostileText}}) },
		"demo": func(a *app) {
			r := poisoned[demo.Report]()
			a.section("containers", a.injectedTable(&r))
			a.section("exchange", a.exchangeTable(&r))
			a.section("servers", a.serverTable(&r))
			a.section("rates", a.rateTable(&r))
		},
		"bench": func(a *app) {
			r := bench.Report{Host: hostileText, Release: hostileText, Command: []string{hostileText}}
			if err := a.printBench(&r, &form{value: formTable}); err != nil {
				t.Error(err)
			}
		},
		"matrix": func(a *app) {
			h := largeHost(t, 2)
			paths := graph.NewTable(h, topo.RulesNCCL)
			var c cells
			for range paths.Paths {
				c.texts = append(c.texts, terminal.Paint(hostileText))
			}
			names := []string{hostileText, hostileText, hostileText}
			a.printMatrix(hostileText, names, paths, c, column{hostileText, names})
		},
		"any table": func(a *app) {
			table := a.newTable(hostileText)
			table.AppendRow(row(hostileText, []byte(hostileText), []string{hostileText}, errors.New(hostileText),
				cdi.Format(hostileText)))
			a.out.Println(table.Render())
		},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			print(&app{out: terminal.New(&out), errOut: terminal.New(&out), log: logrus.New()})
			wantClean(t, name, out.String())
		})
	}
}

func row(cells ...any) table.Row { return cells }

// A process in a container can name a file like the device node of a GPU.
func TestDrainHostileDeviceNamesAreSanitised(t *testing.T) {
	var out bytes.Buffer
	a := &app{out: terminal.New(&out)}
	holder := control.Holder{PID: 7, Command: hostileText, Container: hostileText,
		Devices: []string{"/dev/nvidia0" + hostileText}, Uses: []control.Use{{Kind: hostileText}}}
	a.printHolders([]control.Holder{holder}, true)
	wantClean(t, "drain", out.String())

	out.Reset()
	if err := a.printJSON([]control.Holder{holder}); err != nil {
		t.Fatal(err)
	}
	wantClean(t, "drain -o json", strings.ReplaceAll(out.String(), "\n", " "))
	var read []control.Holder
	if err := json.Unmarshal(out.Bytes(), &read); err != nil {
		t.Fatal(err)
	}
	if want := strings.ToValidUTF8(holder.Devices[0], "\ufffd"); len(read) != 1 || read[0].Devices[0] != want {
		t.Errorf("JSON changes the name: %+v, want %q", read, want)
	}
}

func TestLogSanitisesMessages(t *testing.T) {
	for _, f := range []logrus.Formatter{&logrus.TextFormatter{ForceColors: true, DisableTimestamp: true},
		&logrus.TextFormatter{}, &logrus.JSONFormatter{}} {
		var out bytes.Buffer
		log := logrus.New()
		log.SetOutput(&out)
		log.SetFormatter(formatter{f})
		log.WithField("name", hostileText).Warn(strings.ReplaceAll(hostileText, "\n", " "))
		text := escape.ReplaceAllString(out.String(), "") // colours of logrus
		wantClean(t, reflect.TypeOf(f).String(), text)
	}
}

func TestRelayInspectHostileLogIsSanitised(t *testing.T) {
	var out bytes.Buffer
	a := &app{out: terminal.New(&out), layout: paths.New(t.TempDir())}
	a.printInspection(control.Inspection{LogTail: []string{hostileText, "\tat main.go"},
		Info: generation.Info{Generation: generation.Generation{Config: launch.Config{}}}})
	wantClean(t, "the log", out.String())
	if !strings.Contains(out.String(), "  "+"        at main.go") {
		t.Errorf("the indentation of the log is lost: %q", out.String())
	}
}
