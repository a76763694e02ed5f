//! `mk-docker-opts`: turns `subnet.env` into options for Docker. Specification §6.5.

use std::{collections::BTreeMap, fs, io, process::Command};

use crate::subnet_env::dotenv;

const USAGE: &str =
    "usage: mk-docker-opts [-f FLANNEL-ENV-FILE] [-d DOCKER-ENV-FILE] [-i] [-c] [-m] [-k KEY]

Writes Docker daemon options for the subnet that flannel leased.

  -f FILE  file that flannel wrote (default /run/flannel/subnet.env)
  -d FILE  file to write (default /run/docker_opts.env)
  -i       write each option as a variable of its own
  -c       write one variable with all options (without -i and -c: both)
  -k KEY   name of that variable (default DOCKER_OPTS)
  -m       leave --ip-masq out";

/// Variables as a shell would have them.
type Env = BTreeMap<String, String>;

/// Runs the subcommand with the arguments behind its name. Returns the exit code: 0, or 1 with
/// the reason on stderr.
pub fn run(args: impl IntoIterator<Item = String>) -> u8 {
    let env = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    match run_in(args, env, kernel_routes) {
        Ok(()) => 0,
        Err(message) => {
            eprintln!("{message}");
            1
        }
    }
}

/// What `ip route show` prints; nothing where there is no such program.
fn kernel_routes() -> String {
    Command::new("ip")
        .args(["route", "show"])
        .output()
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default()
}

fn run_in(
    args: impl IntoIterator<Item = String>,
    mut env: Env,
    routes: impl FnOnce() -> String,
) -> Result<(), String> {
    let options = Options::parse(args).ok_or(USAGE)?;
    match fs::read_to_string(&options.flannel_env) {
        Ok(text) => env.extend(dotenv::parse(&text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(format!("cannot read {}: {e}", options.flannel_env)),
    }
    let text = options.render(&mut env)?;
    fs::write(&options.docker_env, text)
        .map_err(|e| format!("cannot write {}: {e}", options.docker_env))?;
    match env.get("FLANNEL_SUBNET").and_then(|subnet| base(subnet)) {
        Some(base) if is_routed(&base, &routes()) => {
            Err(format!("{base} is already routed by way of a gateway: it is in use elsewhere"))
        }
        _ => Ok(()),
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Options {
    flannel_env: String,
    docker_env: String,
    individual: bool,
    combined: bool,
    key: String,
    ip_masq: bool,
}

impl Options {
    /// Reads the arguments the way `getopts` does; `None` asks for the usage text.
    fn parse(args: impl IntoIterator<Item = String>) -> Option<Self> {
        let mut options = Self {
            flannel_env: "/run/flannel/subnet.env".to_owned(),
            docker_env: "/run/docker_opts.env".to_owned(),
            individual: false,
            combined: false,
            key: "DOCKER_OPTS".to_owned(),
            ip_masq: true,
        };
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let Some(letters) = arg.strip_prefix('-').filter(|l| !l.is_empty() && *l != "-") else {
                break;
            };
            let mut rest = letters.chars();
            while let Some(letter) = rest.next() {
                let target = match letter {
                    'i' => {
                        options.individual = true;
                        continue;
                    }
                    'c' => {
                        options.combined = true;
                        continue;
                    }
                    'm' => {
                        options.ip_masq = false;
                        continue;
                    }
                    'f' => &mut options.flannel_env,
                    'd' => &mut options.docker_env,
                    'k' => &mut options.key,
                    _ => return None,
                };
                // The value is what is left of this argument, or the next one.
                *target = match rest.as_str() {
                    "" => args.next()?,
                    value => value.to_owned(),
                };
                break;
            }
        }
        if !options.individual && !options.combined {
            options.individual = true;
            options.combined = true;
        }
        Some(options)
    }

    /// Derives the options from the variables and renders the output file.
    fn render(&self, env: &mut Env) -> Result<String, String> {
        let set = |env: &Env, name: &str| env.get(name).filter(|v| !v.is_empty()).cloned();
        if let Some(subnet) = set(env, "FLANNEL_SUBNET") {
            env.insert("DOCKER_OPT_BIP".to_owned(), format!("--bip={subnet}"));
        }
        if let Some(mtu) = set(env, "FLANNEL_MTU") {
            env.insert("DOCKER_OPT_MTU".to_owned(), format!("--mtu={mtu}"));
        }
        if let Some(ip_masq) = set(env, "FLANNEL_IPMASQ").filter(|_| self.ip_masq) {
            // One of the two masquerades, not both.
            let dockers = match ip_masq.as_str() {
                "true" => false,
                "false" => true,
                other => {
                    return Err(format!("FLANNEL_IPMASQ {other}: must be true or false"));
                }
            };
            env.insert("DOCKER_OPT_IPMASQ".to_owned(), format!("--ip-masq={dockers}"));
        }
        let options: Vec<_> =
            env.iter().filter(|(name, _)| name.starts_with("DOCKER_OPT_")).collect();
        let mut text = String::new();
        if self.individual {
            for (name, value) in &options {
                text.extend([name, "=\"", value, "\"\n"]);
            }
        }
        if self.combined {
            let before = env.get(&self.key).map_or("", String::as_str);
            text.extend([&self.key, "=\"", before]);
            for (_, value) in &options {
                text.extend([" ", value]);
            }
            text.push_str("\"\n");
        }
        Ok(text)
    }
}

/// The subnet's base from the address that flannel gives: its last octet less one.
fn base(subnet: &str) -> Option<String> {
    let (addr, len) = subnet.split_once('/')?;
    let addr: std::net::Ipv4Addr = addr.parse().ok()?;
    let [a, b, c, d] = addr.octets();
    Some(format!("{a}.{b}.{c}.{}/{len}", d.checked_sub(1)?))
}

fn is_routed(base: &str, routes: &str) -> bool {
    routes
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .any(|words| words.first() == Some(&base) && words.contains(&"via"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUBNET_ENV: &str = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.74.1/24\n\
                              FLANNEL_MTU=1472\nFLANNEL_IPMASQ=false\n";

    /// Runs with these arguments and variables; returns the verdict and the file written.
    fn opts(
        args: &[&str],
        env: &[(&str, &str)],
        routes: &str,
    ) -> (Result<(), String>, Option<String>) {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name).display().to_string();
        fs::write(path("subnet.env"), SUBNET_ENV).expect("written");
        let mut all = vec!["-f".to_owned(), path("subnet.env"), format!("-d{}", path("out"))];
        all.extend(args.iter().map(ToString::to_string));
        let env = env.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        let result = run_in(all, env, || routes.to_owned());
        (result, fs::read_to_string(path("out")).ok())
    }

    fn text(args: &[&str]) -> String {
        let (result, text) = opts(args, &[], "");
        assert_eq!(result, Ok(()));
        text.expect("written")
    }

    const INDIVIDUAL: &str = "DOCKER_OPT_BIP=\"--bip=10.1.74.1/24\"\n\
                              DOCKER_OPT_IPMASQ=\"--ip-masq=true\"\nDOCKER_OPT_MTU=\"--mtu=1472\"\n";
    const OPTIONS: &str = "\" --bip=10.1.74.1/24 --ip-masq=true --mtu=1472\"\n";

    #[test]
    fn all_forms() {
        assert_eq!(text(&[]), format!("{INDIVIDUAL}DOCKER_OPTS={OPTIONS}"));
        assert_eq!(text(&["-i"]), INDIVIDUAL);
        assert_eq!(text(&["-c"]), format!("DOCKER_OPTS={OPTIONS}"));
        assert_eq!(text(&["-k", "MY_KEY"]), format!("{INDIVIDUAL}MY_KEY={OPTIONS}"));
        assert_eq!(
            text(&["-m"]),
            "DOCKER_OPT_BIP=\"--bip=10.1.74.1/24\"\nDOCKER_OPT_MTU=\"--mtu=1472\"\n\
             DOCKER_OPTS=\" --bip=10.1.74.1/24 --mtu=1472\"\n"
        );
        assert_eq!(text(&["-cmkX"]), "X=\" --bip=10.1.74.1/24 --mtu=1472\"\n");
    }

    #[test]
    fn inherited_variables_are_carried_along() {
        let env = [("DOCKER_OPTS", "--debug"), ("DOCKER_OPT_DNS", "--dns=1.1.1.1")];
        let (result, text) = opts(&["-c"], &env, "");
        assert_eq!(result, Ok(()));
        assert_eq!(
            text.as_deref(),
            Some(
                "DOCKER_OPTS=\"--debug --bip=10.1.74.1/24 --dns=1.1.1.1 --ip-masq=true --mtu=1472\"\n"
            )
        );
    }

    #[test]
    fn bad_arguments_get_the_usage_text() {
        for args in [&["-h"][..], &["-?"], &["-x"], &["-k"], &["-iz"]] {
            let (result, text) = opts(args, &[], "");
            assert_eq!(result, Err(USAGE.to_owned()), "{args:?}");
            assert_eq!(text, None);
        }
    }

    #[test]
    fn a_bad_ip_masq_value_is_refused() {
        let mut env: Env = [("FLANNEL_IPMASQ".to_owned(), "yes".to_owned())].into();
        let options = Options::parse([]).expect("defaults");
        let error = options.render(&mut env).expect_err("neither true nor false");
        assert!(error.contains("FLANNEL_IPMASQ yes"), "{error}");
    }

    #[test]
    fn a_subnet_routed_elsewhere_is_reported_after_writing() {
        for (routes, routed) in [
            ("default via 10.0.0.1 dev eth0\n10.1.74.0/24 via 10.0.0.9 dev eth0\n", true),
            ("10.1.74.0/24 dev docker0 proto kernel\n", false),
            ("110.1.74.0/24 via 10.0.0.9 dev eth0\n10.1.74.0/24x via 1.1.1.1\n", false),
        ] {
            let (result, text) = opts(&[], &[], routes);
            assert_eq!(result.is_err(), routed, "{routes}");
            assert!(text.is_some());
        }
    }

    #[test]
    fn without_subnet_env_only_the_key_is_written() {
        let dir = tempfile::tempdir().expect("a directory");
        let out = dir.path().join("out").display().to_string();
        let args = ["-f", "/nonexistent/subnet.env", "-d", &out].map(str::to_owned);
        assert_eq!(run_in(args, Env::new(), String::new), Ok(()));
        assert_eq!(fs::read_to_string(out).ok().as_deref(), Some("DOCKER_OPTS=\"\"\n"));
    }
}
