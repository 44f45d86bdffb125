package picture

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html"
	"image/color"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/testutil"
)

// chromium runs a headless Chromium on a file, and returns the output.
func chromium(t *testing.T, file string, arguments ...string) string {
	t.Helper()
	browser := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			browser = path
			break
		}
	}
	if browser == "" {
		t.Skip("there is no Chromium (integration/prerequisites test installs it as root)")
	}
	// Avoid t.TempDir: a child of the browser can outlive the browser, and write to the
	// profile.
	profile, err := os.MkdirTemp("", "peerlane-chromium-")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(profile) }()
	arguments = append([]string{"--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
		"--disable-background-networking", "--disable-dev-shm-usage", "--user-data-dir=" + profile}, arguments...)
	if os.Getuid() == 0 {
		arguments = append(arguments, "--no-sandbox") // Chromium refuses root without the flag
	}
	ctx, cancel := testutil.WithLimit(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, browser, append(arguments, "file://"+file)...)
	cmd.WaitDelay = 10 * time.Second
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, errOut.String())
	}
	return out.String()
}

func writeFile(t *testing.T, name string, text []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, text, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// screenshot returns the number of pixels of a picture by colour, and the colour of the corner.
func screenshot(t *testing.T, file string, width, height float64, arguments ...string) (count map[string]int,
	corner string) {
	t.Helper()
	to := filepath.Join(t.ArtifactDir(), strings.ReplaceAll(t.Name(), "/", "-")+".png")
	chromium(t, file, append(arguments, "--screenshot="+to, fmt.Sprintf("--window-size=%.0f,%.0f", width, height))...)
	f, err := os.Open(to)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }() // read only: closing loses no data
	shot, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	size := shot.Bounds()
	if size.Dx() != int(width+0.5) || size.Dy() != int(height+0.5) {
		t.Fatalf("the screenshot has %v, want %v by %v", size, width, height)
	}
	found := map[color.RGBA]int{}
	at := func(x, y int) color.RGBA { return color.RGBAModel.Convert(shot.At(x, y)).(color.RGBA) }
	for y := range size.Dy() {
		for x := range size.Dx() {
			found[at(x, y)]++
		}
	}
	hex := func(c color.RGBA) string { return fmt.Sprintf("#%02x%02x%02x", c.R, c.G, c.B) }
	count = map[string]int{}
	for c, n := range found {
		count[hex(c)] += n
	}
	return count, hex(at(2, 2))
}

// colours returns the colours of the style sheet by name.
func colours(t *testing.T, dark bool) map[string]string {
	t.Helper()
	part := strings.SplitN(sheet, "@media", 2)[0]
	if dark {
		part = strings.SplitN(sheet, "@media", 2)[1]
	}
	all := map[string]string{}
	for _, m := range regexp.MustCompile(`--(\w+): (#[0-9a-f]{6})`).FindAllStringSubmatch(part, -1) {
		all[m[1]] = m[2]
	}
	return all
}

const (
	light = "--blink-settings=preferredColorScheme=1"
	dark  = "--blink-settings=preferredColorScheme=0"
)

// The machine has lanes of three kinds in every colour.
func TestScreenshotsShowColoursOfMode(t *testing.T) {
	t.Parallel()
	b := build(2)
	b.h.CPUs[0].Socket, b.h.CPUs[1].Socket = 10, 10
	for s := range 4 {
		id := fmt.Sprintf("00aa:%02x:00.0", s)
		b.sw(id, "", s/2, gen(4)).gpu("NVIDIA A100", id, s/2, gen(4)).gpu("NVIDIA A100", id, s/2, gen(4))
	}
	b.nic("00aa:00:00.0", 0, 200, gen(4))
	m := machine{name: "one NIC", host: &b.h}
	m.config.GDR.MaxPath = machines(t)[0].config.GDR.MaxPath
	p := m.draw(t)
	used := map[int]bool{}
	kinds := map[string]bool{}
	for i, l := range p.lanes {
		l.bin = i % bins // the test needs every colour, whatever the estimate of this machine
		used[l.bin], kinds[l.Kind] = true, true
	}
	if len(used) < bins || len(kinds) != 3 {
		t.Fatalf("the machine has colours %v and kinds %v of lanes, and shows too little", used, kinds)
	}
	// A README shows the picture as an image on a dark page.
	image := fmt.Sprintf(`<!DOCTYPE html><body style="margin:0;background:#0d1117"><img src="data:image/svg+xml;base64,%s">`, base64.StdEncoding.EncodeToString(p.SVG()))
	for _, test := range []struct {
		name, file string
		text       []byte
		mode       string
	}{
		{"light", "picture.svg", p.SVG(), light},
		{"dark", "image.html", []byte(image), dark},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			want := colours(t, test.mode == dark)
			count, corner := screenshot(t, writeFile(t, test.file, test.text), 1200, 900, test.mode)
			if corner != want["paper"] {
				t.Errorf("the corner is %s, want the paper's %s", corner, want["paper"])
			}
			if share := float64(count[want["paper"]]) / (1200 * 900); share < 0.3 || share > 0.95 {
				t.Errorf("%.0f %% of the picture is paper: the picture is blank, or covered", 100*share)
			}
			for bin := range used {
				// Bars and lanes; a missing lane leaves only the pixels of the legend.
				if name := "q" + strconv.Itoa(bin); count[want[name]] < 1500 {
					t.Errorf("%d pixels have the colour of lanes %s, %s", count[want[name]], name, want[name])
				}
			}
			for _, name := range []string{"ink", "line", "nic", "bar1", "bar2"} {
				if count[want[name]] < 50 {
					t.Errorf("%d pixels have the colour %s, %s", count[want[name]], name, want[name])
				}
			}
			other := colours(t, test.mode != dark)
			if n := count[other["paper"]]; n > 1200*900/20 {
				t.Errorf("%d pixels have the paper of the other mode", n)
			}
		})
	}
}

// probe is the browser's result for a picture.
type probe struct {
	Name     string
	Texts    int
	Overlaps []string // pairs of texts
	Outside  []string // texts that leave the picture or their box
	Crossed  []string // texts that a lane crosses
}

// measure reads from each picture of a page the positions of texts as the browser draws the
// texts.
const measure = `
const result = [];
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map(e => ({e, b: e.getBoundingClientRect(), t: e.textContent})).filter(x => x.b.width > 0);
  const r = {Name: svg.parentNode.dataset.name, Texts: texts.length, Overlaps: [], Outside: [], Crossed: []};
  const within = (b, f) => b.left >= f.left - 0.5 && b.right <= f.right + 0.5 && b.top >= f.top - 0.5 && b.bottom <= f.bottom + 0.5;
  texts.sort((a, b) => a.b.top - b.b.top);
  texts.forEach((a, i) => {
    if (!within(a.b, frame)) r.Outside.push(a.t);
    const node = a.e.closest(".node");
    if (node && !within(a.b, node.querySelector(".box").getBoundingClientRect())) r.Outside.push(a.t);
    for (const b of texts.slice(i + 1)) {
      if (b.b.top >= a.b.bottom - 0.5) break;
      if (a.b.left < b.b.right - 0.5 && b.b.left < a.b.right - 0.5 && a.b.top < b.b.bottom - 0.5) r.Overlaps.push(a.t + " / " + b.t);
    }
  });
  for (const path of svg.querySelectorAll(".lane[data-lane] .line, .link path")) {
    const p = path.getBoundingClientRect();
    for (const a of texts) {
      if (a.b.right < p.left || a.b.left > p.right || a.b.bottom < p.top || a.b.top > p.bottom) continue;
      let hit = false;
      for (let x = a.b.left + 1; x < a.b.right && !hit; x += 6)
        for (const y of [0.35, 0.75])
          hit = hit || path.isPointInStroke(new DOMPoint(x - frame.left, a.b.top + y * (a.b.bottom - a.b.top) - frame.top));
      if (hit) r.Crossed.push(a.t);
    }
  }
  result.push(r);
}
const pre = document.createElement("pre");
pre.id = "result";
pre.textContent = JSON.stringify(result);
document.body.append(pre);
`

// dumped returns the content of the element result, written by a script of a page.
func dumped(t *testing.T, dom string, into any) {
	t.Helper()
	found := regexp.MustCompile(`(?s)<pre id="result">(.*?)</pre>`).FindStringSubmatch(dom)
	if found == nil {
		t.Fatalf("the page's script did not end; the page is %.2000s", dom)
	}
	if err := json.Unmarshal([]byte(html.UnescapeString(found[1])), into); err != nil {
		t.Fatal(err)
	}
}

func TestTextsNeitherOverlapNorLeaveThePicture(t *testing.T) {
	t.Parallel()
	var page strings.Builder
	page.WriteString("<!DOCTYPE html><meta charset=utf-8><body style='margin:0'>")
	all := machines(t)
	// The faulty picture proves that the measurement detects faults.
	broken := *all[0].picture
	broken.columns = append(slices.Clone(broken.columns),
		text{margin, 46, "", styleTitle, "over the title"}, text{broken.width - 5, 20, "", styleText, "outside"},
		text{broken.lanes[0].label.x + 20, broken.lanes[0].stops[0].y + 4, "", styleText, "on a lane"})
	for _, m := range append(slices.Clone(all), machine{name: "broken", svg: string(broken.SVG())}) {
		_, svg, _ := strings.Cut(m.svg, "?>")
		fmt.Fprintf(&page, "<div data-name=%q>%s</div>", m.name, svg)
	}
	fmt.Fprintf(&page, "<script>%s</script>", measure)
	var probes []probe
	dumped(t, chromium(t, writeFile(t, "all.html", []byte(page.String())), "--dump-dom", "--window-size=1600,1000"),
		&probes)
	if len(probes) != len(all)+1 {
		t.Fatalf("the browser saw %d pictures, want %d", len(probes), len(all)+1)
	}
	for _, p := range probes {
		if p.Name == "broken" {
			if !slices.ContainsFunc(p.Overlaps, func(s string) bool { return strings.Contains(s, "over the title") }) ||
				!slices.Contains(p.Outside, "outside") || !slices.Contains(p.Crossed, "on a lane") {
				t.Errorf("the probe misses the faults of the broken picture: %+v", p)
			}
			continue
		}
		if p.Texts < 10 {
			t.Errorf("%s: the browser saw %d texts", p.Name, p.Texts)
		}
		for what, texts := range map[string][]string{"lie on each other": p.Overlaps,
			"leave the picture or their box": p.Outside, "have a line through them": p.Crossed} {
			if len(texts) > 0 {
				t.Errorf("%s: %d texts %s: %q", p.Name, len(texts), what, texts[:min(4, len(texts))])
			}
		}
	}
}

// A README beside a menu shows a picture at about 400 pixels, and so does a phone.
func TestPictureInANarrowColumnIsReadable(t *testing.T) {
	t.Parallel()
	var drawn machine
	for _, m := range machines(t) {
		if m.name == "eight GPUs and two NICs" {
			drawn = m
		}
	}
	_, svg, _ := strings.Cut(drawn.svg, "?>")
	frame := "<!DOCTYPE html><meta charset=utf-8><style>body{margin:0} svg{width:400px;height:auto}</style>" + svg
	const script = `
addEventListener("load", () => {
  const svg = document.querySelector("iframe").contentDocument.querySelector("svg");
  const texts = [...svg.querySelectorAll("text")].map(e => ({b: e.getBoundingClientRect(), t: e.textContent})).filter(x => x.b.width > 0);
  const r = {Texts: texts.map(x => x.t), Small: [], Overlaps: []};
  texts.forEach((a, i) => {
    if (a.b.height < 10) r.Small.push(a.t);
    for (const b of texts.slice(i + 1))
      if (a.b.left < b.b.right - 0.5 && b.b.left < a.b.right - 0.5 && a.b.top < b.b.bottom - 1.5 && b.b.top < a.b.bottom - 1.5) r.Overlaps.push(a.t + " / " + b.t);
  });
  const pre = document.createElement("pre");
  pre.id = "result";
  pre.textContent = JSON.stringify(r);
  document.body.append(pre);
});
`
	page := fmt.Sprintf("<!DOCTYPE html><meta charset=utf-8><body><iframe width=400 height=900 "+
		"srcdoc=\"%s\"></iframe><script>%s</script>", html.EscapeString(frame), script)
	var got struct{ Texts, Small, Overlaps []string }
	dumped(t, chromium(t, writeFile(t, "narrow.html", []byte(page)), "--dump-dom"), &got)
	for _, want := range []string{"GPU 0", "GPU 7", "mlx5_0", "staged", gbs(drawn.picture.estimate.GPUs[0].Relay)} {
		if !slices.Contains(got.Texts, want) {
			t.Errorf("%q cannot be seen; the texts are %q", want, got.Texts)
		}
	}
	if len(got.Small) > 0 || len(got.Overlaps) > 0 {
		t.Errorf("smaller than 10 pixels: %q; over each other: %q", got.Small, got.Overlaps)
	}
}

// The page's policy allows only the page's script; the test adds its script to the policy.
func TestPageHighlightsLaneUnderPointer(t *testing.T) {
	t.Parallel()
	var odd machine
	for _, m := range machines(t) {
		if m.name == "an odd tree" {
			odd = m
		}
	}
	const script = `
const on = () => [...document.querySelectorAll(".on")].map(e => e.tagName + " " + (e.dataset.lane ?? e.dataset.lanes)).sort();
const lane = document.querySelector("svg .lane[data-lane='0']");
lane.dispatchEvent(new PointerEvent("pointerenter"));
const entered = on(), some = document.querySelector("svg").classList.contains("some");
lane.dispatchEvent(new PointerEvent("pointerleave"));
const pre = document.createElement("pre");
pre.id = "result";
pre.textContent = JSON.stringify({entered, some, left: on(), scripts: document.scripts.length, paper: getComputedStyle(document.body).backgroundColor});
document.body.append(pre);
`
	text := strings.Replace(odd.page, "script-src '", "script-src '"+scriptHash(script)+"' '", 1)
	text = strings.Replace(text, "</body>", "<script>"+script+"</script></body>", 1)
	var got struct {
		Entered, Left []string
		Some          bool
		Scripts       int
		Paper         string
	}
	dumped(t, chromium(t, writeFile(t, "page.html", []byte(text)), dark, "--dump-dom"), &got)
	if got.Scripts != 2 {
		t.Errorf("the page has %d scripts, want the page's and the test's", got.Scripts)
	}
	var r, g, b int
	if _, err := fmt.Sscanf(got.Paper, "rgb(%d, %d, %d)", &r, &g, &b); err != nil ||
		fmt.Sprintf("#%02x%02x%02x", r, g, b) != colours(t, true)["paper"] {
		t.Errorf("the page's ground is %s in the dark, want %s", got.Paper, colours(t, true)["paper"])
	}
	var links []string
	for _, l := range odd.picture.links {
		if l.node != nil && slices.Contains(l.node.lanes, 0) {
			links = append(links, "g "+strings.Trim(fmt.Sprint(l.node.lanes), "[]"))
		}
	}
	want := append(links, "g 0", "g 0", "TR 0", "TR 0") // the line, the bars, and the rows of the table
	slices.Sort(want)
	if diff := cmp.Diff(want, got.Entered); diff != "" || len(links) == 0 || !got.Some {
		t.Errorf("highlighted elements with the pointer on lane 0 (-want +got):\n%s", diff)
	}
	if len(got.Left) > 0 {
		t.Errorf("highlighted elements after the pointer left: %q", got.Left)
	}
}
