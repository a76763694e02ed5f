//! The command line: which command, with which options.
//!
//! `flannel-agent [flags]` runs the agent and takes what flanneld takes (specification §1.1,
//! §1.2); a first word that names a command runs that instead.

pub mod environment;
pub mod flags;
mod go_syntax;

use std::{
    ffi::OsString,
    fmt,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use clap::{ArgAction, Args, FromArgMatches, ValueEnum};

pub use flags::Options;

/// The name the binary goes by in messages.
const PROGRAM: &str = "flannel-agent";

/// How environment variables are looked up; [`std::env::var_os`] outside of tests.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// What to do.
#[derive(Debug)]
pub enum Command {
    /// Run the agent.
    Run(Box<Options>),
    /// Print [`version_line`] on standard error and stop (§1.3 step 2).
    Version,
    /// Show how the agent is.
    Status(StatusArgs),
    /// List the peers.
    Peers(PeersArgs),
    /// List the flows that bypass the host's stack.
    Flows(FlowsArgs),
    /// Remove what agents made.
    Cleanup(CleanupArgs),
    /// Carry over what is kept with etcd's v2 API.
    MigrateEtcdV2(Box<MigrateArgs>),
    /// Turn `subnet.env` into Docker's options; the words are the script's own (§6.5).
    MkDockerOpts(Vec<String>),
    /// Install the CNI plugin and its configuration.
    InstallCni(InstallCniArgs),
    /// Install one file; the words are source and target.
    InstallConf(Vec<OsString>),
}

/// The end of the program: help, a mistake on the command line, or why the agent cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Exit status: 0 for help, 2 for a flag that cannot be parsed, 1 for a value out of bounds.
    pub code: u8,
    /// What to print, without the final newline.
    pub message: String,
}

impl Exit {
    /// The agent cannot run or go on: exit status 1.
    pub fn failure(message: impl Into<String>) -> Self {
        Self { code: 1, message: message.into() }
    }

    fn usage(message: impl Into<String>) -> Self {
        Self { code: 2, message: message.into() }
    }

    /// Prints the message (help on standard output, mistakes on standard error).
    pub fn report(&self) -> ExitCode {
        // Nobody is left to tell when the stream is closed.
        let _ = if self.code == 0 {
            writeln!(io::stdout(), "{}", self.message)
        } else {
            writeln!(io::stderr(), "{}", self.message)
        };
        self.code.into()
    }
}

impl From<clap::Error> for Exit {
    fn from(error: clap::Error) -> Self {
        let code = if error.use_stderr() { 2 } else { 0 };
        Self { code, message: error.to_string().trim_end().to_owned() }
    }
}

/// Something found while parsing that goes to the log once there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// Worth an operator's look, though it works.
    Warning(String),
    /// Was asked for and is not done.
    Error(String),
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Warning(text) | Self::Error(text)) = self;
        f.write_str(text)
    }
}

/// How a client command prints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Tables for people.
    #[default]
    Text,
    /// JSON for machines.
    Json,
}

/// What every command that asks the running agent takes.
#[derive(Clone, Debug, Args)]
pub struct ClientArgs {
    /// How to print.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub output: Output,
    /// The running agent's control socket.
    #[arg(long, value_name = "PATH", default_value = flags::DEFAULT_CONTROL_SOCKET)]
    pub control_socket: PathBuf,
}

/// Arguments of `status`.
#[derive(Clone, Debug, Args)]
pub struct StatusArgs {
    /// How to ask and how to print.
    #[command(flatten)]
    pub client: ClientArgs,
    /// The subnet file to show while the agent does not answer.
    #[arg(long, value_name = "PATH", default_value = flags::DEFAULT_SUBNET_FILE)]
    pub subnet_file: PathBuf,
}

/// Arguments of `peers`.
#[derive(Clone, Debug, Args)]
pub struct PeersArgs {
    /// How to ask and how to print.
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Arguments of `flows`.
#[derive(Clone, Debug, Args)]
pub struct FlowsArgs {
    /// How to print.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub output: Output,
    /// Where the agent pins its BPF maps.
    #[arg(long, value_name = "DIR", default_value = flags::DEFAULT_BPF_PIN_DIR)]
    pub bpf_pin_dir: PathBuf,
}

/// Arguments of `cleanup`.
#[derive(Clone, Debug, Args)]
pub struct CleanupArgs {
    /// How to print, and the socket at which no agent may answer.
    #[command(flatten)]
    pub client: ClientArgs,
    /// The agent's subnet file.
    #[arg(long, value_name = "PATH", default_value = flags::DEFAULT_SUBNET_FILE)]
    pub subnet_file: PathBuf,
    /// The agent's state directory.
    #[arg(long, value_name = "DIR", default_value = flags::DEFAULT_STATE_DIR)]
    pub state_dir: PathBuf,
    /// The agent's directory of pinned eBPF objects.
    #[arg(long, value_name = "DIR", default_value = flags::DEFAULT_BPF_PIN_DIR)]
    pub bpf_pin_dir: PathBuf,
}

/// Arguments of `install-cni`. An empty target leaves that file out.
#[derive(Clone, Debug, Args)]
pub struct InstallCniArgs {
    /// The plugin to install; empty: the file `flannel` beside this program.
    #[arg(long, value_name = "PATH", default_value = "")]
    pub plugin: String,
    /// The host's directory of CNI plugins; empty: install no plugin.
    #[arg(long, value_name = "DIRECTORY", default_value = "/opt/cni/bin")]
    pub bin_dir: String,
    /// The configuration list to install.
    #[arg(long, value_name = "PATH", default_value = "/etc/kube-flannel/cni-conf.json")]
    pub conflist: PathBuf,
    /// Where the container runtime reads it; empty: install none.
    #[arg(long, value_name = "PATH", default_value = "/etc/cni/net.d/10-flannel.conflist")]
    pub conf_file: String,
}

impl InstallCniArgs {
    /// What to do.
    pub fn plan(&self) -> crate::cni::install::Plan {
        let given = |path: &String| Some(path).filter(|p| !p.is_empty()).map(PathBuf::from);
        crate::cni::install::Plan {
            plugin: given(&self.plugin),
            bin_dir: given(&self.bin_dir),
            conflist: self.conflist.clone(),
            conf_file: given(&self.conf_file),
        }
    }
}

/// Arguments of `migrate-etcd-v2`.
#[derive(Clone, Debug, Args)]
pub struct MigrateArgs {
    /// Where etcd is, for both APIs.
    #[command(flatten)]
    pub etcd: flags::EtcdFlags,
    /// Only show what would be written.
    #[arg(long)]
    pub dry_run: bool,
    /// How to print.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub output: Output,
}

/// A command beside running the agent.
struct Subcommand {
    name: &'static str,
    about: &'static str,
    parse: fn(&Self, Vec<OsString>, Environment<'_>) -> Result<Command, Exit>,
}

/// All commands beside running the agent. One line each.
const SUBCOMMANDS: &[Subcommand] = &[
    Subcommand {
        name: "status",
        about: "Show how the running agent is; exit 0 only if it is ready",
        parse: |s, words, env| Ok(Command::Status(s.client_args(words, env)?)),
    },
    Subcommand {
        name: "peers",
        about: "List the peers and what the data path knows of them",
        parse: |s, words, env| Ok(Command::Peers(s.client_args(words, env)?)),
    },
    Subcommand {
        name: "flows",
        about: "List the flows that bypass the host's stack, from the pinned maps",
        parse: |s, words, env| Ok(Command::Flows(s.client_args(words, env)?)),
    },
    Subcommand {
        name: "cleanup",
        about: "Remove devices, routes, eBPF programs and files that a stopped agent left",
        parse: |s, words, env| Ok(Command::Cleanup(s.client_args(words, env)?)),
    },
    Subcommand {
        name: "migrate-etcd-v2",
        about: "Carry leases and configuration over from etcd's v2 API to v3",
        parse: |s, words, env| Ok(Command::MigrateEtcdV2(Box::new(s.client_args(words, env)?))),
    },
    Subcommand {
        name: "mk-docker-opts",
        about: "Turn the subnet file into options for Docker, as mk-docker-opts.sh does",
        parse: |_, words, _| {
            let words = words.into_iter().map(go_syntax::utf8).collect::<Result<_, _>>()?;
            Ok(Command::MkDockerOpts(words))
        },
    },
    Subcommand {
        name: "install-cni",
        about: "Put the CNI plugin and its configuration into the host's directories",
        parse: |s, words, env| Ok(Command::InstallCni(s.client_args(words, env)?)),
    },
    Subcommand {
        name: "install-conf",
        about: "Copy one file in one step: install-conf SOURCE TARGET",
        parse: |_, words, _| Ok(Command::InstallConf(words)),
    },
];

impl Subcommand {
    /// Parses the words after a command's name. Unlike the agent's flags, stray words are errors.
    fn client_args<T: Args + FromArgMatches>(
        &self,
        words: Vec<OsString>,
        env: Environment<'_>,
    ) -> Result<T, Exit> {
        let clap = T::augment_args(clap::Command::new(self.name))
            .bin_name(format!("{PROGRAM} {}", self.name))
            .about(self.about)
            .args_override_self(true)
            .disable_help_flag(true)
            .arg(help_flag());
        let line = go_syntax::normalise(&clap, words)?;
        if let Some(word) = line.rest.first() {
            return Err(Exit::usage(format!(
                "error: unexpected word '{}' after '{PROGRAM} {}'\n\nFor more information, try \
                 '{PROGRAM} {0} --help'.",
                word.display(),
                self.name,
            )));
        }
        let mut words = line.flags;
        // Notes are dropped: a client has no log, and its flags are shared with the agent, which
        // reports a bad variable.
        environment::overlay(&clap, &mut words, env);
        Ok(T::from_arg_matches(&parse_words(&clap, &words)?)?)
    }
}

/// Parses the command line of a program that may be called by another name: as the files
/// `install-conf` and `mk-docker-opts.sh` of flannel's image it is those, else it is the agent.
pub fn parse_as(
    program: &std::ffi::OsStr,
    args: impl IntoIterator<Item = OsString>,
    env: Environment<'_>,
) -> Result<Command, Exit> {
    let name = std::path::Path::new(program).file_name().and_then(|name| name.to_str());
    let subcommand = match name {
        Some("install-conf") => Some("install-conf"),
        Some("mk-docker-opts.sh") => Some("mk-docker-opts"),
        _ => None,
    };
    parse(subcommand.map(OsString::from).into_iter().chain(args), env)
}

/// Parses everything after the program's name.
pub fn parse(
    args: impl IntoIterator<Item = OsString>,
    env: Environment<'_>,
) -> Result<Command, Exit> {
    let mut words: Vec<OsString> = args.into_iter().collect();
    if let Some(first) = words.first().filter(|w| !w.as_encoded_bytes().starts_with(b"-")) {
        let Some(subcommand) = SUBCOMMANDS.iter().find(|s| *first == *s.name) else {
            let names: Vec<_> = SUBCOMMANDS.iter().map(|s| s.name).collect();
            return Err(Exit::usage(format!(
                "error: there is no command '{}'; commands are {}\n\nWithout a command the agent \
                 runs. For more information, try '{PROGRAM} --help'.",
                first.display(),
                names.join(", "),
            )));
        };
        words.remove(0);
        return (subcommand.parse)(subcommand, words, env);
    }
    parse_agent(words, env)
}

/// What `--version` prints.
pub fn version_line() -> String {
    format!("{PROGRAM} {}", env!("CARGO_PKG_VERSION"))
}

fn parse_agent(words: Vec<OsString>, env: Environment<'_>) -> Result<Command, Exit> {
    let clap = agent_command();
    let line = go_syntax::normalise(&clap, words)?;
    let mut words = line.flags;
    if flags::wants_version(&parse_words(&clap, &words)?) {
        return Ok(Command::Version);
    }
    let mut notes = environment::overlay(&clap, &mut words, env);
    if let Some(word) = line.rest.first() {
        notes.push(Note::Warning(format!(
            "the command line is read up to its first word that is no flag: \"{}\" and the {} \
             word(s) after it are ignored; a boolean flag takes its value as --flag=false",
            word.display(),
            line.rest.len() - 1,
        )));
    }
    let matches = parse_words(&clap, &words)?;
    let mut options = Options::from_arg_matches(&matches)?;
    options.effective = flags::effective(&clap, &matches);
    options.notes = notes;
    validate(&mut options)?;
    Ok(Command::Run(Box::new(options)))
}

/// The agent's flags as clap sees them.
fn agent_command() -> clap::Command {
    let commands: Vec<_> =
        SUBCOMMANDS.iter().map(|s| format!("  {:<16} {}\n", s.name, s.about)).collect();
    Options::augment_args(clap::Command::new(PROGRAM))
        .about("Drop-in flannel agent whose VXLAN data path runs in eBPF")
        .override_usage(format!("{PROGRAM} [FLAG]...\n       {PROGRAM} COMMAND [FLAG]..."))
        .after_help(format!(
            "Commands (each has its own --help):\n{}\nFlags take one dash or two. Each \
             flag also has an environment variable: {}ETCD_ENDPOINTS\nis --etcd-endpoints, and \
             so on; the command line wins.",
            commands.concat(),
            environment::PREFIX,
        ))
        .disable_version_flag(true)
        .args_override_self(true)
        .disable_help_flag(true)
        .arg(help_flag())
}

/// One line a flag, with `-h` and `--help` alike.
fn help_flag() -> clap::Arg {
    clap::Arg::new("help")
        .short('h')
        .long("help")
        .action(ArgAction::HelpShort)
        .help("Print this and stop")
}

fn parse_words(clap: &clap::Command, words: &[OsString]) -> Result<clap::ArgMatches, Exit> {
    let program = OsString::from(PROGRAM);
    Ok(clap.clone().try_get_matches_from(std::iter::once(&program).chain(words))?)
}

/// Checks and corrections beyond a single flag's syntax.
fn validate(options: &mut Options) -> Result<(), Exit> {
    const MARGIN: std::ops::RangeInclusive<i64> = 1..=1439;
    let margin = options.etcd.renew_margin_minutes;
    if !MARGIN.contains(&margin) {
        return Err(Exit {
            code: 1,
            message: format!(
                "error: --subnet-lease-renew-margin is {margin}; it has to be between {} and {} \
                 minutes, less than the lease's 24 hours",
                MARGIN.start(),
                MARGIN.end(),
            ),
        });
    }
    let firewall = &mut options.firewall;
    if firewall.resync_seconds < 1 {
        options.notes.push(Note::Warning(format!(
            "--iptables-resync is {} and has to be at least 1 second: 1 is used",
            firewall.resync_seconds
        )));
        firewall.resync_seconds = 1;
    }
    Ok(())
}

impl Options {
    /// Writes what parsing found and all options in effect to the log, secrets masked.
    pub fn log(&self) {
        for note in &self.notes {
            match note {
                Note::Warning(text) => tracing::warn!("{text}"),
                Note::Error(text) => tracing::error!("{text}"),
            }
        }
        tracing::info!("{} starts with {}", version_line(), self.effective.join(" "));
    }
}

impl flags::FirewallFlags {
    /// How often rules are looked after, at least one second.
    pub fn resync(&self) -> Duration {
        Duration::from_secs(self.resync_seconds.max(1).unsigned_abs())
    }
}

#[cfg(test)]
mod tests;
