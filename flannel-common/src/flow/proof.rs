//! The proof's steps, as functions of what was seen.

use super::{
    CLOSED, Direction, Flow, FlowRules, OFFER_DOUBLINGS, OFFER_PAUSE_NS, PROMOTED, Seen, Segment,
    Verdict, WORTH_PACKETS,
};

/// How long ago; 0 if another CPU's clock reading is ahead of ours.
#[inline(always)]
const fn since(now: u64, then: u64) -> u64 {
    now.saturating_sub(then)
}

impl Flow {
    /// An entry for a flow whose first packet goes into the stack now.
    #[inline(always)]
    pub fn begin(now: u64, rules: &FlowRules) -> Self {
        Self { born: now, epoch: rules.epoch, ..Self::default() }
    }

    /// Whether the agent let it bypass the stack, in this epoch.
    #[inline(always)]
    pub const fn is_promoted(&self, rules: &FlowRules) -> bool {
        self.state & (PROMOTED | CLOSED) == PROMOTED && self.epoch == rules.epoch
    }

    /// Back to the beginning: nothing that was seen counts any more.
    #[inline(always)]
    fn lapse(&mut self, now: u64, rules: &FlowRules) {
        self.state = 0;
        self.proved = 0;
        self.confirmed = [0; 2];
        self.asked = [0; 2];
        // Not 0: a promotion may be under way. And one who lapses again and again waits longer.
        self.offers = self.offers.min(1);
        self.offered = now;
        self.epoch = rules.epoch;
    }

    /// A packet that has not been through the stack yet.
    #[inline(always)]
    pub fn before(
        &mut self,
        direction: Direction,
        seen: &Seen,
        segment: Segment,
        rules: &FlowRules,
    ) -> Verdict {
        let now = seen.now;
        match segment {
            Segment::Plain => (),
            Segment::Odd => return Verdict::Stack,
            // A promotion may be under way; it must not find the entry.
            Segment::Opening | Segment::Closing if self.state & PROMOTED != 0 => {
                return Verdict::Forget;
            }
            Segment::Opening | Segment::Closing if self.offers != 0 => return Verdict::Forget,
            Segment::Opening => {
                *self = Self::begin(now, rules);
                return Verdict::Stack;
            }
            Segment::Closing => {
                self.state = CLOSED;
                return Verdict::Stack;
            }
        }
        if self.state & CLOSED != 0 {
            return Verdict::Stack;
        }
        if self.epoch != rules.epoch {
            self.lapse(now, rules);
        }
        let way = direction as usize & 1;
        if self.state & PROMOTED == 0 {
            if self.asked[way] == 0 {
                self.asked[way] = now;
            }
            return Verdict::Stack;
        }
        self.judge(direction, seen, rules)
    }

    /// A plain packet of a promoted flow.
    #[inline(always)]
    fn judge(&mut self, direction: Direction, seen: &Seen, rules: &FlowRules) -> Verdict {
        let now = seen.now;
        let way = direction as usize & 1;
        if self.asked[way] != 0 && since(now, self.asked[way]) >= rules.interval {
            self.lapse(now, rules);
            self.asked[way] = now;
            return Verdict::Stack;
        }
        if self.may_pass(direction, seen, rules) {
            return Verdict::Bypass;
        }
        if self.is_due(direction, now, rules) {
            self.asked[way] = now;
        }
        Verdict::Stack
    }

    /// Whether a plain packet may bypass the stack now. Changes nothing.
    #[inline(always)]
    pub fn may_pass(&self, direction: Direction, seen: &Seen, rules: &FlowRules) -> bool {
        let now = seen.now;
        let (way, other) = (direction as usize & 1, direction.other() as usize & 1);
        // Both directions or neither: what the other one asked has to be answered too.
        let unanswered =
            self.asked[other] != 0 && since(now, self.asked[other]) >= rules.interval / 2;
        self.is_promoted(rules)
            && since(now, self.confirmed[way]) < rules.interval
            && !self.is_due(direction, now, rules)
            && !unanswered
            && now < rules.alive_until
            && (matches!(direction, Direction::In) || self.is_from_pod(seen))
    }

    /// Whether the next packet has to ask. One asks while the others go on, in time for an answer
    /// before the proof is old.
    #[inline(always)]
    const fn is_due(&self, direction: Direction, now: u64, rules: &FlowRules) -> bool {
        let way = direction as usize & 1;
        self.asked[way] == 0 && since(now, self.confirmed[way]) >= rules.interval / 2
    }

    /// Whether a frame comes from the pod and is meant for the gateway: the stack's frames to the
    /// pod, the other way round.
    #[inline(always)]
    fn is_from_pod(&self, seen: &Seen) -> bool {
        let mut to_gateway = self.pod_frame;
        to_gateway.rotate_left(3);
        seen.ifindex == self.pod_ifindex && seen.frame == to_gateway
    }

    /// A packet that came out of the stack. Returns whether to offer the flow to the agent.
    #[inline(always)]
    #[must_use]
    pub fn after(
        &mut self,
        direction: Direction,
        seen: &Seen,
        segment: Segment,
        rules: &FlowRules,
    ) -> bool {
        let now = seen.now;
        let way = direction as usize & 1;
        // Only what answers a packet that went in proves anything.
        if segment != Segment::Plain
            || self.state & CLOSED != 0
            || self.epoch != rules.epoch
            || self.asked[way] == 0
        {
            return false;
        }
        let same = match direction {
            Direction::Out => self.tunnel_frame == seen.frame,
            Direction::In => self.pod_frame == seen.frame && self.pod_ifindex == seen.ifindex,
        };
        if !same {
            // The way has changed: whoever bypasses the stack would take the old one.
            if self.state & PROMOTED != 0 || self.confirmed[way] != 0 {
                self.lapse(now, rules);
            }
            match direction {
                Direction::Out => self.tunnel_frame = seen.frame,
                Direction::In => {
                    self.pod_frame = seen.frame;
                    self.pod_ifindex = seen.ifindex;
                }
            }
        }
        self.asked[way] = 0;
        self.confirmed[way] = now;
        if self.state & PROMOTED != 0 {
            return false;
        }
        self.proved = self.proved.saturating_add(1).min(WORTH_PACKETS);
        self.is_worth_an_offer(now, rules)
    }

    #[inline(always)]
    fn is_worth_an_offer(&mut self, now: u64, rules: &FlowRules) -> bool {
        let pause = OFFER_PAUSE_NS << self.offers.min(OFFER_DOUBLINGS);
        if self.proved < WORTH_PACKETS
            || !self.is_proved(now, rules)
            || now >= rules.alive_until
            || (self.offers != 0 && since(now, self.offered) < pause)
        {
            return false;
        }
        self.offers = self.offers.saturating_add(1);
        self.offered = now;
        true
    }

    /// Whether both directions came out of the stack unchanged within the interval.
    #[inline(always)]
    pub const fn is_proved(&self, now: u64, rules: &FlowRules) -> bool {
        let [out, inward] = self.confirmed;
        out != 0
            && inward != 0
            && since(now, out) < rules.interval
            && since(now, inward) < rules.interval
            && self.epoch == rules.epoch
            && self.state & CLOSED == 0
    }

    /// The same flow, promoted: what the agent writes after conntrack has confirmed it.
    #[must_use]
    pub const fn promoted(mut self) -> Self {
        self.state |= PROMOTED;
        self
    }
}

#[cfg(test)]
mod tests;
