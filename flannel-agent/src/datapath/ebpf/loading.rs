//! Loading the programs in three steps, of which only the second takes long: the verifier needs
//! a good part of a second, on a busy machine many.

use aya::{
    Ebpf,
    maps::{Array, Map, MapData},
};
use flannel_common::map::Config;

use super::{
    EbpfError, EbpfOptions, decap_probe, object, object::chain, pin, pin::PinDirectory, self_test,
};

/// The pins are ours, nothing is loaded yet.
pub struct Loading {
    options: EbpfOptions,
    pins: PinDirectory,
}

/// Everything is in the kernel, nothing is attached yet.
pub struct Loaded {
    pub(super) options: EbpfOptions,
    pub(super) ebpf: Ebpf,
    pub(super) pins: PinDirectory,
    /// Whether this kernel can undo merging.
    pub(super) takes_merged: Result<bool, String>,
}

/// What still works from an earlier agent's maps, for which nobody cares while ours are loaded.
pub struct Predecessor(Option<Array<MapData, Config>>);

impl Loading {
    /// The quick first step: finds out whether it can be, and takes the pins.
    ///
    /// # Errors
    /// What is missing.
    pub fn open(options: EbpfOptions) -> Result<Self, EbpfError> {
        object::check_built()?;
        object::check_capabilities()?;
        let pins = PinDirectory::open(&options.pin_dir, &options.device)?;
        pins.discard_misfits()?;
        Ok(Self { options, pins })
    }

    /// What an earlier agent left.
    pub fn predecessor(&self) -> Predecessor {
        let config = pin::CONFIG.open(&self.pins.maps());
        Predecessor(config.and_then(|config| Array::try_from(Map::Array(config)).ok()))
    }

    /// The long second step; on any thread.
    ///
    /// # Errors
    /// Why the kernel does not take the programs.
    pub fn load(self) -> Result<Loaded, EbpfError> {
        let Self { options, pins } = self;
        let mut ebpf = object::load(&pins.maps(), options.log)?;
        self_test::run(&mut ebpf)?;
        let takes_merged = decap_probe::run(&mut ebpf);
        Ok(Loaded { options, ebpf, pins, takes_merged })
    }
}

impl Predecessor {
    /// Has the earlier agent's programs leave everything to the kernel's device. What they know
    /// of the peers is no longer right.
    pub fn retire(&mut self) {
        let Some(mut config) = self.0.take() else { return };
        let retired =
            config.get(&0, 0).and_then(|known| config.set(0, Config { switches: 0, ..known }, 0));
        match retired {
            Ok(()) => tracing::debug!("the programs of the agent before us are out of use"),
            Err(error) => tracing::warn!("an earlier agent's programs: {}", chain(&error)),
        }
    }
}
