//! The BPF programs of flannel-agent: entry points. One module a hook, the maps in [`maps`];
//! what a packet is, is decided in `flannel-common`.
#![no_std]
#![no_main]
#![expect(clippy::inline_always, reason = "a call costs a stack frame of 512 bytes in all")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "helpers take lengths of 32 bits and return small numbers in 64: ours are of headers"
)]

mod count;
mod decap;
mod decap_probe;
mod encap;
mod flows;
mod maps;
mod pod;
mod pod_guard;
mod readdress;
mod self_test;
mod skb;
mod tunnel_egress;
mod tunnel_ingress;
mod underlay_ingress;
mod underlay_xdp;
mod xdp_front;

use aya_ebpf::{
    macros::{classifier, xdp},
    programs::{TcContext, XdpContext},
};

/// Tunnel device, TC egress: sends packets into the tunnel.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands the context over by value")]
fn tunnel_egress(ctx: TcContext) -> i32 {
    tunnel_egress::run(&ctx)
}

/// Tunnel device, TC ingress: delivers packets of promoted flows.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands the context over by value")]
fn tunnel_ingress(ctx: TcContext) -> i32 {
    tunnel_ingress::run(&ctx)
}

/// Host side of a pod's device, TC ingress: sends packets of promoted flows into the tunnel.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands the context over by value")]
fn pod_ingress(ctx: TcContext) -> i32 {
    pod::ingress(&ctx)
}

/// Host side of a pod's device, TC egress: sees what the stack delivers to the pod.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands the context over by value")]
fn pod_egress(ctx: TcContext) -> i32 {
    pod::egress(&ctx)
}

/// Underlay device, TC ingress: filters what comes by the tunnel and takes it out.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands the context over by value")]
fn underlay_ingress(ctx: TcContext) -> i32 {
    underlay_ingress::run(&ctx)
}

/// Underlay device, native XDP: takes packets out of the tunnel before the kernel has looked at them.
#[xdp(frags)]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands the context over by value")]
fn underlay_xdp(ctx: XdpContext) -> u32 {
    underlay_xdp::run(&ctx)
}

/// Devices that carry pods, TC ingress: no pod speaks VXLAN to a node.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands the context over by value")]
fn pod_guard(ctx: TcContext) -> i32 {
    pod_guard::run(&ctx)
}

/// On no device: whether this kernel can do it all.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands the context over by value")]
fn self_test(ctx: TcContext) -> i32 {
    self_test::run(&ctx)
}

/// On no device: whether this kernel can undo merging.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands the context over by value")]
fn decap_probe(ctx: TcContext) -> i32 {
    decap_probe::run(&ctx)
}

/// Some helpers are open to GPL-compatible programs only.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // Nothing here panics; the verifier refuses a program that could come to this loop.
    loop {}
}
