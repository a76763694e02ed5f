//! flannel-agent: a drop-in flannel whose VXLAN data path runs in eBPF.
//!
//! The library behind the two binaries. `docs/architecture.md` tells how the
//! modules fit together: a subnet manager delivers leases, [`peer_table`] folds
//! them into the wanted set, a [`backend`] makes the kernel equal to it.

pub mod agent;
pub mod backend;
pub mod background;
pub mod cleanup;
pub mod cli;
pub mod cni;
pub mod commands;
pub mod config;
pub mod control;
pub mod datapath;
pub mod device_claim;
pub mod external_interface;
pub mod firewall;
pub mod go_json;
mod host_checks;
pub mod lease;
pub mod mac;
mod memory;
pub mod mk_docker_opts;
pub mod netlink;
pub mod peer_table;
pub mod reconciler;
pub mod startup;
pub mod state;
pub mod subnet_env;
pub mod subnet_manager;
pub mod telemetry;

use std::process::ExitCode;

use cli::Command;

/// Runs what the command line asks for; the whole of the binary.
pub fn main() -> ExitCode {
    let mut words = std::env::args_os();
    let program = words.next().unwrap_or_default();
    let command = match cli::parse_as(&program, words, &|name| std::env::var_os(name)) {
        Ok(command) => command,
        Err(exit) => return exit.report(),
    };
    match command {
        Command::Run(options) => run_agent(*options),
        Command::Version => {
            eprintln!("{}", cli::version_line());
            ExitCode::SUCCESS
        }
        Command::Status(args) => finish(commands::status::run(&args, &mut std::io::stdout())),
        Command::Peers(args) => {
            let pins = std::path::Path::new(cli::flags::DEFAULT_BPF_PIN_DIR);
            let offline =
                || datapath::ebpf::read_pinned_peers(pins).map_err(|reason| reason.to_string());
            finish(commands::peers::run(&args, &offline, &mut std::io::stdout()))
        }
        Command::Flows(args) => {
            let read = |pins: &std::path::Path| {
                datapath::ebpf::read_pinned_flows(pins).map_err(|reason| reason.to_string())
            };
            finish(commands::flows::run(&args, &read, &mut std::io::stdout()))
        }
        Command::Cleanup(args) => finish(commands::cleanup::run(&args, &mut std::io::stdout())),
        Command::MigrateEtcdV2(args) => {
            finish(commands::migrate_etcd_v2::run(&args, &mut std::io::stdout()))
        }
        Command::MkDockerOpts(words) => mk_docker_opts::run(words).into(),
        Command::InstallCni(args) => {
            finish(cni::install::run(&args.plan(), &mut std::io::stdout()))
        }
        Command::InstallConf(words) => {
            finish(cni::install::run_conf(&words, &mut std::io::stdout()))
        }
    }
}

fn run_agent(options: cli::Options) -> ExitCode {
    telemetry::log::init(&options.log);
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(err) => {
            tracing::error!("cannot start: {err}");
            return ExitCode::FAILURE;
        }
    };
    let local = tokio::task::LocalSet::new();
    match runtime.block_on(local.run_until(startup::run(options))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(exit) => {
            tracing::error!("{}", exit.message);
            exit.code.into()
        }
    }
}

/// A client command's exit status.
fn finish(result: anyhow::Result<u8>) -> ExitCode {
    match result {
        Ok(code) => code.into(),
        Err(err) => {
            eprintln!("error: {err:#}");
            ExitCode::FAILURE
        }
    }
}
