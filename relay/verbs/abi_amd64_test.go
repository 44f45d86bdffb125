package verbs_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/relay/libpeerlane"
	"github.com/peerlane/peerlane/relay/verbs"
)

// layout is rdma-core's, of its headers: a line is an expression in C and its value. An entry has
// the size of a structure and the offset of the last used field, or of several fields if more than
// sizes could be wrong. Of those with a mutex the size is x86-64's.
const layout = `
sizeof(union ibv_gid) = 16
sizeof(struct ibv_gid_entry) = 32
offsetof(struct ibv_gid_entry, gid_index) = 16
offsetof(struct ibv_gid_entry, gid_type) = 24
offsetof(struct ibv_gid_entry, ndev_ifindex) = 28
sizeof(struct ibv_device) = 664
offsetof(struct ibv_device, node_type) = 16
offsetof(struct ibv_device, transport_type) = 20
offsetof(struct ibv_device, name) = 24
offsetof(struct ibv_device, dev_name) = 88
sizeof(struct ibv_device_attr) = 232
offsetof(struct ibv_device_attr, node_guid) = 64
offsetof(struct ibv_device_attr, sys_image_guid) = 72
offsetof(struct ibv_device_attr, max_mr_size) = 80
offsetof(struct ibv_device_attr, vendor_id) = 96
offsetof(struct ibv_device_attr, vendor_part_id) = 100
offsetof(struct ibv_device_attr, hw_ver) = 104
offsetof(struct ibv_device_attr, max_qp) = 108
offsetof(struct ibv_device_attr, max_qp_wr) = 112
offsetof(struct ibv_device_attr, device_cap_flags) = 116
offsetof(struct ibv_device_attr, max_sge) = 120
offsetof(struct ibv_device_attr, max_sge_rd) = 124
offsetof(struct ibv_device_attr, max_cq) = 128
offsetof(struct ibv_device_attr, max_cqe) = 132
offsetof(struct ibv_device_attr, max_mr) = 136
offsetof(struct ibv_device_attr, max_pd) = 140
offsetof(struct ibv_device_attr, max_qp_rd_atom) = 144
offsetof(struct ibv_device_attr, max_qp_init_rd_atom) = 156
offsetof(struct ibv_device_attr, phys_port_cnt) = 227
sizeof(struct ibv_ece) = 12
sizeof(struct ibv_port_attr) = 52
offsetof(struct ibv_port_attr, flags) = 47
offsetof(struct ibv_port_attr, state) = 0
offsetof(struct ibv_port_attr, max_mtu) = 4
offsetof(struct ibv_port_attr, active_mtu) = 8
offsetof(struct ibv_port_attr, gid_tbl_len) = 12
offsetof(struct ibv_port_attr, max_msg_sz) = 20
offsetof(struct ibv_port_attr, pkey_tbl_len) = 32
offsetof(struct ibv_port_attr, lid) = 34
offsetof(struct ibv_port_attr, sm_lid) = 36
offsetof(struct ibv_port_attr, active_width) = 43
offsetof(struct ibv_port_attr, active_speed) = 44
offsetof(struct ibv_port_attr, phys_state) = 45
offsetof(struct ibv_port_attr, link_layer) = 46
sizeof(struct ibv_async_event) = 16
offsetof(struct ibv_async_event, event_type) = 8
sizeof(struct ibv_wc) = 48
offsetof(struct ibv_wc, status) = 8
offsetof(struct ibv_wc, opcode) = 12
offsetof(struct ibv_wc, vendor_err) = 16
offsetof(struct ibv_wc, byte_len) = 20
offsetof(struct ibv_wc, imm_data) = 24
offsetof(struct ibv_wc, qp_num) = 28
offsetof(struct ibv_wc, wc_flags) = 36
sizeof(struct ibv_pd) = 16
sizeof(struct ibv_mr) = 48
offsetof(struct ibv_mr, lkey) = 36
offsetof(struct ibv_mr, rkey) = 40
sizeof(struct ibv_global_route) = 24
offsetof(struct ibv_global_route, sgid_index) = 20
offsetof(struct ibv_global_route, hop_limit) = 21
offsetof(struct ibv_global_route, traffic_class) = 22
sizeof(struct ibv_ah_attr) = 32
offsetof(struct ibv_ah_attr, dlid) = 24
offsetof(struct ibv_ah_attr, sl) = 26
offsetof(struct ibv_ah_attr, is_global) = 29
offsetof(struct ibv_ah_attr, port_num) = 30
sizeof(struct ibv_qp_cap) = 20
sizeof(struct ibv_qp_init_attr) = 64
offsetof(struct ibv_qp_init_attr, send_cq) = 8
offsetof(struct ibv_qp_init_attr, recv_cq) = 16
offsetof(struct ibv_qp_init_attr, cap) = 32
offsetof(struct ibv_qp_init_attr, qp_type) = 52
offsetof(struct ibv_qp_init_attr, sq_sig_all) = 56
sizeof(struct ibv_qp_attr) = 144
offsetof(struct ibv_qp_attr, qp_state) = 0
offsetof(struct ibv_qp_attr, path_mtu) = 8
offsetof(struct ibv_qp_attr, rq_psn) = 20
offsetof(struct ibv_qp_attr, sq_psn) = 24
offsetof(struct ibv_qp_attr, dest_qp_num) = 28
offsetof(struct ibv_qp_attr, qp_access_flags) = 32
offsetof(struct ibv_qp_attr, ah_attr) = 56
offsetof(struct ibv_qp_attr, pkey_index) = 120
offsetof(struct ibv_qp_attr, max_rd_atomic) = 126
offsetof(struct ibv_qp_attr, max_dest_rd_atomic) = 127
offsetof(struct ibv_qp_attr, min_rnr_timer) = 128
offsetof(struct ibv_qp_attr, port_num) = 129
offsetof(struct ibv_qp_attr, timeout) = 130
offsetof(struct ibv_qp_attr, retry_cnt) = 131
offsetof(struct ibv_qp_attr, rnr_retry) = 132
sizeof(struct ibv_sge) = 16
offsetof(struct ibv_sge, length) = 8
offsetof(struct ibv_sge, lkey) = 12
sizeof(struct ibv_send_wr) = 128
offsetof(struct ibv_send_wr, next) = 8
offsetof(struct ibv_send_wr, sg_list) = 16
offsetof(struct ibv_send_wr, num_sge) = 24
offsetof(struct ibv_send_wr, opcode) = 28
offsetof(struct ibv_send_wr, send_flags) = 32
offsetof(struct ibv_send_wr, imm_data) = 36
offsetof(struct ibv_send_wr, RDMA.remote_addr) = 40
offsetof(struct ibv_send_wr, RDMA.rkey) = 48
sizeof(struct ibv_recv_wr) = 32
sizeof(struct ibv_comp_channel) = 16
offsetof(struct ibv_comp_channel, fd) = 8
sizeof(struct ibv_cq) = 128
offsetof(struct ibv_cq, channel) = 8
offsetof(struct ibv_cq, cqe) = 28
sizeof(struct ibv_qp) = 160
offsetof(struct ibv_qp, qp_num) = 52
sizeof(struct ibv_context_ops) = 256
offsetof(struct ibv_context_ops, poll_cq) = 88
offsetof(struct ibv_context_ops, req_notify_cq) = 96
offsetof(struct ibv_context_ops, post_send) = 200
offsetof(struct ibv_context_ops, post_recv) = 208
sizeof(struct ibv_context) = 328
offsetof(struct ibv_context, ops) = 8
offsetof(struct ibv_context, cmd_fd) = 264
offsetof(struct ibv_context, async_fd) = 268
offsetof(struct rdma_event_channel, fd) = 0
offsetof(struct rdma_cm_id, verbs) = 0
offsetof(struct rdma_cm_id, qp) = 24
offsetof(struct rdma_cm_id, route) = 32
offsetof(struct rdma_cm_id, port_num) = 348
sizeof(struct rdma_conn_param) = 24
offsetof(struct rdma_conn_param, private_data_len) = 8
offsetof(struct rdma_conn_param, responder_resources) = 9
offsetof(struct rdma_conn_param, initiator_depth) = 10
offsetof(struct rdma_conn_param, retry_count) = 12
offsetof(struct rdma_conn_param, rnr_retry_count) = 13
offsetof(struct rdma_conn_param, qp_num) = 16
sizeof(struct rdma_cm_event) = 80
offsetof(struct rdma_cm_event, listen_id) = 8
offsetof(struct rdma_cm_event, event) = 16
offsetof(struct rdma_cm_event, status) = 20
offsetof(struct rdma_cm_event, param) = 24
`

// constants are those of abi.h by name: the program prints both headers' values.
var constants = regexp.MustCompile(`(?m)^\t((?:IBV|RDMA)_[A-Z0-9_]+) =`)

// rdmaCore is a folder with rdma-core's headers, where they are installed.
func rdmaCore() (string, bool) {
	for _, dir := range []string{os.Getenv("PEERLANE_RDMA_CORE_HEADERS"), "/usr/include"} {
		if _, err := os.Stat(filepath.Join(dir, "rdma/rdma_cma.h")); dir != "" && err == nil {
			return dir, true
		}
	}
	return "", false
}

// Our declarations have the layout that is written above, x86-64's, of which sizes of
// mutexes are; and so have the headers, where they are installed.
func TestABILayoutMatchesHeaders(t *testing.T) {
	ours := t.TempDir()
	if err := os.WriteFile(filepath.Join(ours, "abi.h"), []byte(verbs.Header), 0o644); err != nil {
		t.Fatal(err)
	}
	got := measure(t, `#include "abi.h"`, "rdma", "-I"+ours)
	if diff := cmp.Diff(strings.TrimSpace(layout), got.layout); diff != "" {
		t.Errorf("abi.h, as against rdma-core's (-):\n%s", diff)
	}
	dir, ok := rdmaCore()
	if !ok {
		t.Log("rdma-core's headers are not installed; the numbers are those of release 44")
		return
	}
	theirs := measure(t, "#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>", "wr.rdma", "-I"+dir)
	if diff := cmp.Diff(theirs, got, cmp.AllowUnexported(measured{})); diff != "" {
		t.Errorf("abi.h, as against the headers in %s (-):\n%s", dir, diff)
	}
}

type measured struct{ layout, constants string }

// measure compiles and runs a program that prints the values of layout, and the constants.
func measure(t *testing.T, include, rdma string, flags ...string) measured {
	t.Helper()
	var text strings.Builder
	fmt.Fprintf(&text, "%s\n#include <stddef.h>\n#include <stdio.h>\n#define RDMA %s\nint main(void) {\n", include, rdma)
	for line := range strings.Lines(strings.TrimSpace(layout)) {
		expression, _, _ := strings.Cut(line, " = ")
		fmt.Fprintf(&text, "\tprintf(\"%%s = %%zu\\n\", %q, %s);\n", expression, expression)
	}
	text.WriteString("\tputs(\"\");\n")
	for _, name := range constants.FindAllStringSubmatch(verbs.Header, -1) {
		fmt.Fprintf(&text, "\tprintf(\"%%s = %%d\\n\", %q, (int)%s);\n", name[1], name[1])
	}
	text.WriteString("\treturn 0;\n}\n")
	compiler, err := libpeerlane.Compiler()
	programs.MustHave(t, err)
	dir := t.TempDir()
	source, program := filepath.Join(dir, "layout.c"), filepath.Join(dir, "layout")
	if err := os.WriteFile(source, []byte(text.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	arguments := append(
		append(append([]string{}, compiler[1:]...), flags...),
		"-std=gnu11",
		"-Wno-missing-braces",
		"-o",
		program,
		source,
	)
	if out, err := exec.Command(compiler[0], arguments...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := exec.Command(program).Output()
	if err != nil {
		t.Fatal(err)
	}
	sizes, values, _ := strings.Cut(string(out), "\n\n")
	if n := strings.Count(values, "\n"); n < 80 {
		t.Fatalf("%d constants of abi.h are compared", n)
	}
	return measured{sizes, values}
}
