//! Leasing a subnet: the plan is made from a list, each step of it is guarded by what the list
//! showed, and whoever loses a race makes a new plan.

use std::time::Duration;

use tracing::{error, info, warn};

use super::{
    EtcdSubnetManager,
    held::{Held, Term},
    registry::{Entry, Listing, Put, Version},
};
use crate::{
    config::NetworkConfig,
    lease::{Lease, LeaseAttributes},
    subnet_manager::{
        GrantedLease, LeaseRequest, StoreError,
        acquire::{Choice, KnownLease, holder, plan},
    },
};

/// Plans made before we give up for now.
const TRIES: usize = 10;
/// How old the list made for [`stored_identity`](crate::subnet_manager::SubnetManager) may be.
const RECENT: Duration = Duration::from_secs(5);

impl EtcdSubnetManager {
    pub(super) async fn claim(
        &self,
        config: &NetworkConfig,
        request: &LeaseRequest,
    ) -> Result<GrantedLease, StoreError> {
        *self.held.borrow_mut() = None;
        let recent = self.recent.borrow_mut().take();
        let mut listing = match recent.filter(|listing| listing.taken.elapsed() < RECENT) {
            Some(listing) => listing,
            None => self.registry.list().await?,
        };
        for _ in 0..TRIES {
            if let Some(held) = self.try_claim(config, request, &mut listing).await? {
                let granted =
                    GrantedLease { lease: held.lease.clone(), expires: held.term.expires() };
                listing.push(Entry { lease: held.lease.clone(), version: held.version });
                *self.recent.borrow_mut() = Some(listing);
                *self.held.borrow_mut() = Some(held);
                *self.reported.borrow_mut() = None;
                return Ok(granted);
            }
            listing = self.registry.list().await?;
        }
        Err(StoreError::NoLease(format!(
            "other nodes took the subnet we chose {TRIES} times in a row; trying again"
        )))
    }

    /// Makes a plan and carries it out; `None` if the list turned out to be out of date.
    async fn try_claim(
        &self,
        config: &NetworkConfig,
        request: &LeaseRequest,
        listing: &mut Listing,
    ) -> Result<Option<Held>, StoreError> {
        // What cannot be read is taken all the same.
        let readable = listing.known.len();
        listing.known.extend(listing.unreadable.iter().map(|subnets| KnownLease {
            lease: Lease { subnets: *subnets, attributes: LeaseAttributes::default() },
            permanent: true,
        }));
        let plan = plan(config, &request.attributes, request.previous, &listing.known);
        listing.known.truncate(readable);
        let plan = plan.map_err(|error| StoreError::NoLease(error.to_string()))?;

        if let Some(by) = plan.previous_held_by {
            self.report_taken(request, by);
        }
        for useless in plan.discard {
            let Some(version) = listing.version(&useless) else { continue };
            info!(
                "our lease of {useless} does not fit the network configuration and is given back"
            );
            self.registry.delete_if(&useless, version.mod_revision).await?;
            listing.remove(&useless);
        }
        match plan.choice {
            Choice::TakeOver { subnets, permanent } => {
                let Some(found) = listing.entry(&subnets) else { return Ok(None) };
                warn_of_twin(&found.lease, &request.attributes);
                let lease = Lease { subnets, attributes: request.attributes.clone() };
                if permanent && found.lease == lease {
                    return Ok(Some(Held::new(lease, found.version, Term::Reservation)));
                }
                self.write(lease, found.version.mod_revision, permanent).await
            }
            Choice::Create(subnets) => {
                let lease = Lease { subnets, attributes: request.attributes.clone() };
                self.write(lease, 0, false).await
            }
        }
    }

    /// Writes our lease over the state seen; `None` if that is not the state any more.
    async fn write(
        &self,
        lease: Lease,
        seen: i64,
        reservation: bool,
    ) -> Result<Option<Held>, StoreError> {
        let (etcd_lease, term) = if reservation {
            (0, Term::Reservation)
        } else {
            let (etcd_lease, length) = self.registry.grant(self.lease_ttl).await?;
            (etcd_lease, Term::starting_now(length))
        };
        match self.registry.put_if(&lease, seen, etcd_lease).await? {
            Put::Written(mod_revision) => {
                let version = Version { mod_revision, etcd_lease };
                Ok(Some(Held::new(lease, version, term)))
            }
            Put::Conflict(_) => {
                if !reservation {
                    self.registry.revoke(etcd_lease).await;
                }
                Ok(None)
            }
        }
    }

    /// Tells the operator, once, that two nodes claim one subnet.
    fn report_taken(&self, request: &LeaseRequest, by: Lease) {
        let report = Some((request.previous, by));
        if *self.reported.borrow() == report {
            return;
        }
        if let Some((previous, by)) = &report {
            error!(
                "our previous subnet {previous} is now leased to {}: we ({}) take another one; \
                 pods that still use addresses of {previous} have to be restarted",
                holder(&by.attributes),
                holder(&request.attributes),
            );
        }
        *self.reported.borrow_mut() = report;
    }
}

/// Says that a lease we take over was published by a device that is not ours. That is a new
/// device of this host, or a second host with the same address.
fn warn_of_twin(found: &Lease, ours: &LeaseAttributes) {
    if let (Some(theirs), Some(mine)) = (vtep_mac(&found.attributes), vtep_mac(ours))
        && !theirs.eq_ignore_ascii_case(&mine)
    {
        warn!(
            "taking over the lease of {} with public IP {}: it names the VTEP MAC {theirs}, ours \
             is {mine}. If this host has no new device, another host uses the same public IP",
            found.subnets,
            holder(ours),
        );
    }
}

fn vtep_mac(attributes: &LeaseAttributes) -> Option<String> {
    let data: serde_json::Value =
        serde_json::from_str(attributes.backend_data.as_ref()?.as_str()).ok()?;
    data.get("VtepMAC")?.as_str().filter(|mac| !mac.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::RawJson;

    #[test]
    fn the_mac_is_found_in_vxlan_data_only() {
        let mac = |data: &str| {
            vtep_mac(&LeaseAttributes {
                backend_data: Some(RawJson::from_compact(data)),
                ..LeaseAttributes::default()
            })
        };
        assert_eq!(mac(r#"{"VNI":1,"VtepMAC":"02:fa::1"}"#).as_deref(), Some("02:fa::1"));
        assert_eq!(mac(r#"{"VNI":1,"VtepMAC":""}"#), None);
        assert_eq!(mac("[]"), None);
        assert_eq!(mac("not json"), None);
        assert_eq!(vtep_mac(&LeaseAttributes::default()), None);
    }
}
