//! The kernel's links, addresses, routes and neighbours, over rtnetlink, and its
//! connections, over ctnetlink, and whether it has `IPsec` policies. Their types stay in here.

pub mod address;
pub mod conntrack;
pub mod inventory;
pub mod link;
pub mod mirror;
pub mod neighbour;
pub mod route;
pub mod socket;
pub mod xfrm;
