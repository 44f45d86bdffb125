package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/peerlane/peerlane/kubernetes/explain"
)

func explainCommand() *cobra.Command {
	var namespace, kubeconfig string
	c := &cobra.Command{
		Use:   "explain POD",
		Short: "Explain why a pod waits for devices",
		Long: `explain prints, for each request of a pod that waits for devices and for each node, the free, allocated
and tainted devices that match, and failing selectors and constraints: the scheduler reports "cannot
allocate all claims" in each case. It needs the kubeconfig of an administrator.`,
		Example: "  peerlane-kubelet explain --namespace research job-0",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			rules := clientcmd.NewDefaultClientConfigLoadingRules()
			rules.ExplicitPath = kubeconfig
			config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
			if err != nil {
				return fmt.Errorf("find the API server: %w", err)
			}
			client, err := kubernetes.NewForConfig(config)
			if err != nil {
				return err
			}
			return explainPod(c.Context(), client, namespace, args[0], c.OutOrStdout())
		},
	}
	c.Flags().StringVarP(&namespace, "namespace", "n", metav1.NamespaceDefault, "namespace of the pod")
	c.Flags().StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file; empty for KUBECONFIG or ~/.kube/config")
	return c
}

// explainPod reads the state of a cluster and prints the explanation of a pod.
func explainPod(ctx context.Context, client kubernetes.Interface, namespace, name string, out io.Writer) error {
	pod, err := client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	dra := client.ResourceV1()
	claims, err := dra.ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	templates, err := dra.ResourceClaimTemplates(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	classes, err := dra.DeviceClasses().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	slices, err := dra.ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, line := range explain.Pod(ctx, pod, explain.Cluster{Claims: claims.Items, Templates: templates.Items,
		Classes: classes.Items, Slices: slices.Items}) {
		if _, err := fmt.Fprintln(out, line); err != nil {
			return err
		}
	}
	return nil
}
