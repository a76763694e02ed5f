//! The BPF programs of flannel-agent: entry points. One module a hook, the maps in [`maps`];
//! what a packet is, is decided in `flannel-common`.
#![no_std]
#![no_main]
#![expect(clippy::inline_always, reason = "a call costs a stack frame of 512 bytes in all")]

mod maps;
mod underlay_ingress;

use aya_ebpf::{macros::classifier, programs::TcContext};

/// Underlay device, TC ingress: counts the packets of the tunnel. Never ends the chain.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands the context over by value")]
fn underlay_ingress(ctx: TcContext) -> i32 {
    underlay_ingress::run(&ctx)
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
