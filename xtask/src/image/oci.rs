//! The archive: an OCI image layout (image specification 1.1) in a tar file, as `ctr images import`,
//! `podman load`, `docker load` and `skopeo copy oci-archive:` take it.

use std::io::{self, Write};

use anyhow::{Context, Result};
use flate2::{Compression, GzBuilder};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::tree::Tree;

/// What the image says about itself.
#[derive(Clone, Debug)]
pub struct Description {
    /// The name it is imported under, `localhost/flannel-agent:0.1.0`.
    pub reference: String,
    /// The version, for a label.
    pub version: String,
    /// The program that runs unless a pod names another.
    pub entrypoint: String,
    /// `PATH` inside.
    pub path: String,
}

/// A finished image.
#[derive(Debug)]
pub struct Image {
    /// The manifest's digest, by which registries name the image.
    pub digest: String,
    /// Bytes of all layers, unpacked.
    pub unpacked: usize,
    /// The archive.
    pub archive: Vec<u8>,
}

/// Something stored under its digest.
struct Blob {
    media_type: &'static str,
    digest: String,
    content: Vec<u8>,
}

impl Blob {
    fn new(media_type: &'static str, content: Vec<u8>) -> Self {
        Self { media_type, digest: digest(&content), content }
    }

    fn json(media_type: &'static str, value: &Value) -> Self {
        Self::new(media_type, value.to_string().into_bytes())
    }

    fn descriptor(&self) -> Value {
        json!({"mediaType": self.media_type, "digest": self.digest, "size": self.content.len()})
    }
}

/// Makes the image. The same layers and description give the same bytes.
pub fn build(layers: &[Tree], description: &Description, level: Compression) -> Result<Image> {
    let mut blobs = Vec::new();
    let mut diff_ids = Vec::new();
    let mut unpacked = 0;
    for layer in layers {
        let tar = layer.to_tar()?;
        unpacked += tar.len();
        diff_ids.push(digest(&tar));
        let packed = gzip(&tar, level).context("cannot compress a layer")?;
        blobs.push(Blob::new("application/vnd.oci.image.layer.v1.tar+gzip", packed));
    }
    let labels = json!({
        "org.opencontainers.image.title": "flannel-agent",
        "org.opencontainers.image.version": description.version,
        "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
    });
    let config = Blob::json(
        "application/vnd.oci.image.config.v1+json",
        &json!({
            "architecture": architecture(),
            "os": "linux",
            "config": {
                "Env": [format!("PATH={}", description.path)],
                "Entrypoint": [description.entrypoint],
                "WorkingDir": "/",
                "Labels": labels,
            },
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }),
    );
    let manifest = Blob::json(
        "application/vnd.oci.image.manifest.v1+json",
        &json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config.descriptor(),
            "layers": blobs.iter().map(Blob::descriptor).collect::<Vec<_>>(),
            "annotations": labels,
        }),
    );
    let mut entry = manifest.descriptor();
    let (_, tag) = description.reference.rsplit_once(':').context("the name has no tag")?;
    entry["annotations"] = json!({
        // containerd and podman import it under the one, docker and skopeo know the other.
        "io.containerd.image.name": description.reference,
        "org.opencontainers.image.ref.name": tag,
    });
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [entry],
    });
    let digest = manifest.digest.clone();
    blobs.extend([config, manifest]);
    let mut archive = Tree::new();
    archive.file("oci-layout", 0o644, r#"{"imageLayoutVersion":"1.0.0"}"#);
    archive.file("index.json", 0o644, index.to_string());
    for blob in blobs {
        archive.file(&format!("blobs/{}", blob.digest.replace(':', "/")), 0o644, blob.content);
    }
    Ok(Image { digest, unpacked, archive: archive.to_tar()? })
}

fn digest(content: &[u8]) -> String {
    let mut text = "sha256:".to_owned();
    for byte in Sha256::digest(content) {
        for nibble in [byte >> 4, byte & 0xf] {
            text.extend(char::from_digit(nibble.into(), 16));
        }
    }
    text
}

/// Without a time or a name in the header, which would differ from run to run.
fn gzip(content: &[u8], level: Compression) -> io::Result<Vec<u8>> {
    let mut writer = GzBuilder::new().mtime(0).write(Vec::new(), level);
    writer.write_all(content)?;
    writer.finish()
}

/// This machine's architecture, in Go's words.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> Image {
        let mut tree = Tree::new();
        tree.file("opt/bin/a", 0o755, "program");
        tree.symlink("opt/bin/b", "a");
        let description = Description {
            reference: "localhost/a:1".into(),
            version: "1".into(),
            entrypoint: "/opt/bin/a".into(),
            path: "/opt/bin".into(),
        };
        build(&[tree], &description, Compression::fast()).expect("built")
    }

    #[test]
    fn the_same_input_gives_the_same_image() {
        let (first, second) = (image(), image());
        assert_eq!(first.digest, second.digest);
        assert!(first.archive == second.archive);
        assert_eq!(first.digest.len(), "sha256:".len() + 64);
    }

    #[test]
    fn digests_are_those_of_sha256() {
        assert_eq!(
            digest(b"abc"),
            "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
