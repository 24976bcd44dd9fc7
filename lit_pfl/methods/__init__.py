"""One file a method, its client and its server side by side; one folder a family."""

from lit_pfl.methods.adapters.feddpa import FedDPA
from lit_pfl.methods.adapters.fedit import FedIT
from lit_pfl.methods.adapters.fedsalora import FedSALoRA
from lit_pfl.methods.adapters.ffalora import FFALoRA
from lit_pfl.methods.adapters.flexlora import FlexLoRA
from lit_pfl.methods.factorized.factorized_fl import FactorizedFL
from lit_pfl.methods.factorized.fedslr import FedSLR
from lit_pfl.methods.factorized.fedspa import FedSpa
from lit_pfl.methods.factorized.pfedpara import PFedPara
from lit_pfl.methods.factorized.psi_net import PsiNet
from lit_pfl.methods.global_model.agnostic_fl import AgnosticFL
from lit_pfl.methods.global_model.ccvr import CCVR
from lit_pfl.methods.global_model.elastic_aggregation import ElasticAggregation
from lit_pfl.methods.global_model.fedadmm import FedADMM
from lit_pfl.methods.global_model.fedavg import FedAvg
from lit_pfl.methods.global_model.feddyn import FedDyn
from lit_pfl.methods.global_model.fedlc import FedLC
from lit_pfl.methods.global_model.fedma import FedMA
from lit_pfl.methods.global_model.fednova import FedNova
from lit_pfl.methods.global_model.fedntd import FedNTD
from lit_pfl.methods.global_model.fedopt import FedAdagrad, FedAdam, FedAvgM, FedExP, FedYogi
from lit_pfl.methods.global_model.fedprox import FedProx
from lit_pfl.methods.global_model.fedrs import FedRS
from lit_pfl.methods.global_model.moon import MOON
from lit_pfl.methods.global_model.scaffold import Scaffold
from lit_pfl.methods.knowledge.fd import FD
from lit_pfl.methods.knowledge.fedgen import FedGen
from lit_pfl.methods.knowledge.fedkd import FedKD
from lit_pfl.methods.knowledge.fedproto import FedProto
from lit_pfl.methods.knowledge.fml import FML
from lit_pfl.methods.partial.fedah import FedAH
from lit_pfl.methods.partial.fedas import FedAS
from lit_pfl.methods.partial.fedbabu import FedBABU
from lit_pfl.methods.partial.fedbn import FedBN
from lit_pfl.methods.partial.fedcp import FedCP
from lit_pfl.methods.partial.feddbe import FedDBE
from lit_pfl.methods.partial.fedgh import FedGH
from lit_pfl.methods.partial.fedpac import FedPAC
from lit_pfl.methods.partial.fedper import FedPer
from lit_pfl.methods.partial.fedrep import FedRep
from lit_pfl.methods.partial.fedrod import FedRoD
from lit_pfl.methods.partial.floco import Floco
from lit_pfl.methods.partial.flute import FLUTE
from lit_pfl.methods.partial.gpfl import GPFL
from lit_pfl.methods.partial.lgfedavg import LGFedAvg
from lit_pfl.methods.partial.pfedfda import PFedFDA
from lit_pfl.methods.partial.standalone import StandAlone
from lit_pfl.methods.similarity.apple import APPLE
from lit_pfl.methods.similarity.clustered_fl import ClusteredFL
from lit_pfl.methods.similarity.fedala import FedALA
from lit_pfl.methods.similarity.fedamp import FedAMP, HeurFedAMP
from lit_pfl.methods.similarity.fedcac import FedCAC
from lit_pfl.methods.similarity.fedem import FedEM
from lit_pfl.methods.similarity.fedfomo import FedFOMO
from lit_pfl.methods.similarity.ifca import IFCA
from lit_pfl.methods.similarity.pfedhn import PFedHN
from lit_pfl.methods.similarity.pfedla import PFedLA
from lit_pfl.methods.similarity.pfedsim import PFedSim
from lit_pfl.methods.similarity.simfed import SimFed
from lit_pfl.methods.two_models.apfl import APFL
from lit_pfl.methods.two_models.ditto import Ditto
from lit_pfl.methods.two_models.fedphp import FedPHP
from lit_pfl.methods.two_models.knnper import KNNPer
from lit_pfl.methods.two_models.l2gd import L2GD
from lit_pfl.methods.two_models.perfedavg import PerFedAvg
from lit_pfl.methods.two_models.pfedme import PFedMe

__all__ = [
    "APFL",
    "APPLE",
    "CCVR",
    "FD",
    "FLUTE",
    "FML",
    "GPFL",
    "IFCA",
    "L2GD",
    "MOON",
    "AgnosticFL",
    "ClusteredFL",
    "Ditto",
    "ElasticAggregation",
    "FFALoRA",
    "FactorizedFL",
    "FedADMM",
    "FedAH",
    "FedALA",
    "FedAMP",
    "FedAS",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedCAC",
    "FedCP",
    "FedDBE",
    "FedDPA",
    "FedDyn",
    "FedEM",
    "FedExP",
    "FedFOMO",
    "FedGH",
    "FedGen",
    "FedIT",
    "FedKD",
    "FedLC",
    "FedMA",
    "FedNTD",
    "FedNova",
    "FedPAC",
    "FedPHP",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRS",
    "FedRep",
    "FedRoD",
    "FedSALoRA",
    "FedSLR",
    "FedSpa",
    "FedYogi",
    "FlexLoRA",
    "Floco",
    "HeurFedAMP",
    "KNNPer",
    "LGFedAvg",
    "PFedFDA",
    "PFedHN",
    "PFedLA",
    "PFedMe",
    "PFedPara",
    "PFedSim",
    "PerFedAvg",
    "PsiNet",
    "Scaffold",
    "SimFed",
    "StandAlone",
]
